// SPDX-License-Identifier: Apache-2.0
mod common;
use common::{ramp, run_ranks, step, two_groups};
use fsdp::{BytesOwner, Checkpoint, CheckpointState, ModelOptions, Rename, SaveOptions, Status};
use std::path::PathBuf;

fn empty_folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
fn what_two_ranks_save_one_rank_loads() {
    let folder = empty_folder("plain");
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        (0..3).for_each(|_| step(&mut model, &[first, second], 0.5).unwrap());
        model.save(&folder, &SaveOptions::new().keep(2)).unwrap();
        assert_eq!(model.save(&folder, &SaveOptions::new()).unwrap_err().status, Status::InvalidState); // it is there
        step(&mut model, &[first, second], 0.5).unwrap();
        drop(model);
        context.close().unwrap();
    });
    assert!(fsdp::list_checkpoints(&folder).unwrap().contains("step-0000000003"));
    run_ranks(1, |context| {
        let (mut trained, first, second) = two_groups(&context, &ModelOptions::new());
        (0..4).for_each(|_| step(&mut trained, &[first, second], 0.5).unwrap());
        let (mut model, a, b) = two_groups(&context, &ModelOptions::new());
        let mut window = model.begin_update().unwrap();
        let loaded = window.load(&folder, &Default::default()).unwrap();
        assert_eq!((loaded.step, loaded.ranks, &loaded.name[..]), (3, 2, "step-0000000003"));
        assert!(loaded.loaded_tensors > 0 && loaded.missing_tensors + loaded.unexpected_tensors == 0);
        window.publish().unwrap();
        assert!(model.describe_load().unwrap().contains("\"missing\":[]"));
        step(&mut model, &[a, b], 0.5).unwrap(); // the fourth: with the states of the third
        assert_eq!(model.read_param::<f32>(a, 0).unwrap(), trained.read_param::<f32>(first, 0).unwrap());
        assert_eq!(
            model.read_state::<f32>(b, 0, "exp_avg").unwrap(),
            trained.read_state::<f32>(second, 0, "exp_avg").unwrap()
        );
    });
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_save_in_the_background_has_bytes_of_the_programs_own() {
    let folder = empty_folder("background");
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        let mut save = Checkpoint::begin(&context, &folder, &SaveOptions::new().step(7)).unwrap();
        assert_eq!(save.status().unwrap().state, CheckpointState::Open);
        save.add_model("net", &model).unwrap();
        save.add_bytes("place", b"epoch 3", BytesOwner::Once).unwrap();
        save.add_bytes("random", &[context.rank() as u8; 4], BytesOwner::PerRank).unwrap();
        save.commit().unwrap();
        step(&mut model, &[first, second], 0.5).unwrap(); // beside it
        save.wait().unwrap();
        assert_eq!(save.status().unwrap().name, "step-0000000007");
        let mut opened = Checkpoint::open(&context, &folder).unwrap();
        assert_eq!(opened.read_bytes("place").unwrap(), b"epoch 3");
        assert_eq!(opened.read_bytes("random").unwrap(), [context.rank() as u8; 4]);
        assert_eq!(opened.read_bytes("no such").unwrap_err().status, Status::InvalidArgument);
        let mut window = model.begin_update().unwrap();
        assert_eq!(opened.load_model("net", &mut window, &Default::default()).unwrap().step, 7);
        window.publish().unwrap();
        assert_eq!(model.read_param::<f32>(first, 0).unwrap(), ramp(12));
        drop(model);
        context.close().unwrap();
    });
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn weights_come_by_other_names() {
    let folder = empty_folder("renamed");
    run_ranks(1, |context| {
        let (model, _, _) = two_groups(&context, &ModelOptions::new());
        model.save(&folder, &SaveOptions::new().step(1)).unwrap();
        let mut other = fsdp::Model::new(&context, &ModelOptions::new()).unwrap();
        let params = [fsdp::Param::new("a.weight", &[3, 4]), fsdp::Param::new("a.bias", &[4])];
        let group = other.create_group("a", &params, &Default::default()).unwrap();
        let mut window = other.seal().unwrap();
        let options = fsdp::LoadOptions::new().allow_unexpected();
        window.load_weights(&folder, &[Rename::new("first.*", "a.*")], &options).unwrap();
        window.publish().unwrap();
        assert_eq!(other.read_param::<f32>(group, "a.bias").unwrap(), ramp(4));
    });
    std::fs::remove_dir_all(&folder).unwrap();
}
