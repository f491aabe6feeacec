// SPDX-License-Identifier: Apache-2.0
//! Matrices that come whole to one rank inside the update window, and go back.
mod common;
use common::{ramp, run_ranks};
use fsdp::{
    Bf16, Context, Dtype, Group, Matrix, MatrixOptions, Model, ModelOptions, Optimizer, Param, Role, Status, Window,
};
use std::sync::atomic::{AtomicUsize, Ordering};

const NAMES: [&str; 3] = ["qkv", "bias", "stack"];
const COUNTS: [usize; 3] = [12, 6, 45];

/// "qkv" is cut into splits of 4, 1 and 1 rows, "stack" has three matrices of 3 x 5, and "bias" has none.
fn matrices_model(context: &Context, options: ModelOptions, states: &[&str]) -> (Model, Group) {
    let mut model = Model::new(context, &options).unwrap();
    let params = [
        Param::new("qkv", &[6, 2]).matrix_splits(&[4, 1, 1]),
        Param::new("bias", &[6]),
        Param::new("stack", &[3, 3, 5]).matrix(),
    ];
    let group = model.create_group("net", &params, &Default::default()).unwrap();
    states.iter().for_each(|name| model.add_optimizer_state(name, Dtype::Float32).unwrap());
    model.seal().unwrap().publish().unwrap();
    (model, group)
}

/// The mean of all ranks is a ramp, whose numbers are exact in bfloat16.
fn finish_grads(model: &mut Model, group: Group) -> Window<'_> {
    let mut grads = model.grads(group).unwrap();
    (0..3).for_each(|p| grads.put(p, Some(&ramp(COUNTS[p])[..])).unwrap());
    grads.reduce_last().unwrap();
    model.finish_grads(1.0).unwrap()
}

/// The last row comes first, and numbers are multiplied.
fn change_one(matrix: &mut [f32], columns: usize, batch: usize, split: usize) {
    let before = matrix.to_vec();
    for (row, from) in matrix.chunks_mut(columns).zip(before.chunks(columns).rev()) {
        row.iter_mut().zip(from).for_each(|(to, from)| *to = (1 + split + 2 * batch) as f32 * from);
    }
}

fn change(matrix: &mut Matrix<'_>) {
    let (columns, batch, split) = (matrix.columns, matrix.batch_index as usize, matrix.split_index as usize);
    for number in 0..matrix.count {
        change_one(matrix.get(number).unwrap(), columns, batch + number, split);
    }
}

/// What `change` makes of all matrices.
fn changed(param: usize) -> Vec<f32> {
    let (mut all, mut first) = (ramp(COUNTS[param]), 0);
    let (columns, splits, batches) = if param == 0 { (2, vec![4, 1, 1], 1) } else { (5, vec![3], 3) };
    for batch in 0..batches {
        for (split, rows) in splits.iter().enumerate() {
            change_one(&mut all[first..first + rows * columns], columns, batch, split);
            first += rows * columns;
        }
    }
    all
}

fn change_all(window: &mut Window<'_>, options: &MatrixOptions) {
    let mut matrices = window.collect_matrices(options).unwrap();
    while let Some(mut matrix) = matrices.next().unwrap() {
        change(&mut matrix);
    }
    matrices.give_back().unwrap();
}

#[test]
fn are_whole_on_one_rank_and_their_rows_come_back() {
    for ranks in 1..=3 {
        let elements = AtomicUsize::new(0);
        run_ranks(ranks, |context| {
            let (mut model, group) = matrices_model(&context, ModelOptions::new(), &[]);
            let mut window = finish_grads(&mut model, group);
            let mut matrices = window.collect_matrices(&MatrixOptions::new()).unwrap();
            while let Some(mut matrix) = matrices.next().unwrap() {
                assert_eq!((matrix.group, matrix.dtype), (group, Dtype::Float32));
                assert_eq!(NAMES[matrix.param_index], matrix.name);
                let first = (3 * matrix.batch_index + matrix.row_offset) as usize * matrix.columns;
                let whole = ramp(COUNTS[matrix.param_index]);
                let own = matrix.get::<f32>(0).unwrap().to_vec();
                assert_eq!(own[..], whole[first..first + matrix.rows * matrix.columns]);
                elements.fetch_add(matrix.count * own.len(), Ordering::Relaxed);
                change(&mut matrix);
            }
            matrices.give_back().unwrap();
            let grads = [0, 1, 2].map(|p| window.read_grad::<f32>(group, p).unwrap());
            assert_eq!(grads, [changed(0), ramp(6), changed(2)]);
            window.step_adamw(0.1, &Default::default()).unwrap();
            context.close().unwrap();
        });
        assert_eq!(elements.into_inner(), 12 + 45, "{ranks} ranks");
    }
}

#[test]
fn go_from_one_state_to_another() {
    run_ranks(2, |context| {
        let options = ModelOptions::new().optimizer(Optimizer::Caller);
        let (mut model, group) = matrices_model(&context, options, &["momentum"]);
        let mut window = finish_grads(&mut model, group);
        let options = MatrixOptions::new().target("momentum").dtype(Dtype::Bfloat16);
        let mut matrices = window.collect_matrices(&options).unwrap();
        while let Some(mut matrix) = matrices.next().unwrap() {
            let size = matrix.rows * matrix.columns;
            assert_eq!(matrix.get::<Bf16>(matrix.count - 1).unwrap().len(), size);
            for error in [matrix.get::<f32>(0).unwrap_err(), matrix.get::<Bf16>(matrix.count).unwrap_err()] {
                assert_eq!(error.status, Status::InvalidArgument);
                assert!(error.message.contains(&matrix.name), "{error}");
            }
        }
        matrices.give_back().unwrap();
        assert_eq!(window.read_state::<f32>(group, "stack", "momentum").unwrap(), ramp(45));
        assert_eq!(window.read_state::<f32>(group, "bias", "momentum").unwrap(), [0.0; 6]);
        change_all(&mut window, &MatrixOptions::new().source("momentum").target("main_weight"));
        assert_eq!(window.read_param::<f32>(group, "qkv").unwrap(), changed(0));
        assert!(window.collect_matrices(&MatrixOptions::new().source("velocity")).is_err());
        window.publish().unwrap();
        context.close().unwrap();
    });
}

#[test]
fn that_are_dropped_are_told_by_the_next_call() {
    run_ranks(2, |context| {
        let (mut model, group) = matrices_model(&context, ModelOptions::new(), &[]);
        let mut window = finish_grads(&mut model, group);
        let mut matrices = window.collect_matrices(&MatrixOptions::new()).unwrap();
        matrices.next().unwrap();
        drop(matrices);
        let error = window.step_adamw(0.1, &Default::default()).unwrap_err();
        assert_eq!(error.status, Status::InvalidState);
        assert!(error.message.contains("fsdp_return_matrices"), "{error}");
        model.discard_step().unwrap();
        let mut window = finish_grads(&mut model, group);
        change_all(&mut window, &MatrixOptions::new());
        assert_eq!(window.read_grad::<f32>(group, "stack").unwrap(), changed(2));
        window.step_adamw(0.1, &Default::default()).unwrap();
        context.close().unwrap();
    });
}

#[test]
fn have_a_plan_and_memory() {
    run_ranks(2, |context| {
        let (model, group) = matrices_model(&context, ModelOptions::new().matrix_bytes(256), &[]);
        let plan = model.matrix_plan().unwrap();
        assert!(plan.contains("\"matrix_bytes\": 256,"), "{plan}");
        assert!(plan.contains("\"name\": \"stack\", \"batch\": 2,"), "{plan}");
        assert!(model.role_bytes(Role::Matrix, 0).unwrap() > 0);
        let splits = [0, 1, 2].map(|p| model.param_info(group, p).unwrap().matrix_splits);
        assert_eq!(splits, [vec![4, 1, 1], vec![], vec![3]]);
        context.close().unwrap();
    });
}

#[test]
fn of_splits_that_do_not_add_up_are_refused() {
    run_ranks(1, |context| {
        let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
        for (splits, told) in [(&[4, 1][..], "add up to 5 rows"), (&[], "there are matrix_splits")] {
            let param = Param::new("w", &[6, 2]).matrix_splits(splits);
            let error = model.create_group("g", &[param], &Default::default()).unwrap_err();
            assert_eq!(error.status, Status::InvalidArgument);
            assert!(error.message.contains(told), "{error}");
        }
    });
}
