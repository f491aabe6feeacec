// SPDX-License-Identifier: Apache-2.0
mod common;
use common::{run_ranks, run_ranks_with, two_groups};
use fsdp::{Context, ContextOptions, Dtype, LogLevel, Model, ModelOptions, Param, Status, ValueOp};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[test]
fn an_error_has_status_rank_and_message() {
    run_ranks(2, |context| {
        let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
        let size = 4 + u64::from(context.rank());
        model.create_group("g", &[Param::new("w", &[size])], &Default::default()).unwrap();
        let error = model.seal().map(drop).unwrap_err();
        assert_eq!((error.status, error.rank), (Status::Mismatch, Some(1)));
        assert!(error.message.contains('4') && error.message.contains('5'), "{error}");
        assert!(error.to_string().starts_with("FSDP_MISMATCH: "), "{error}");
    });
}

#[test]
fn a_string_with_a_zero_byte_is_an_error() {
    let error = Context::new(&ContextOptions::new().trace_directory("a\0b")).map(drop).unwrap_err();
    assert_eq!(error.status, Status::InvalidArgument);
    run_ranks(1, |context| assert!(context.begin_span("a\0b").is_err()));
    let error = fsdp::Context::plan(0, 0, &ContextOptions::new()).map(drop).unwrap_err();
    assert_eq!(fsdp::get_last_message(), error.message);
    assert_eq!([Dtype::Float32.size(), Dtype::Bfloat16.size(), Dtype::Float16.size()], [4, 2, 2]);
}

#[test]
fn values_are_reduced_and_a_mesh_has_its_ranks() {
    run_ranks(4, |context| {
        let rank = f64::from(context.rank());
        let mut values = [rank, -rank];
        context.all_reduce_values(&mut values, ValueOp::Max).unwrap();
        assert_eq!(values, [3.0, 0.0]);
        let half = if context.rank() < 2 { [0, 1] } else { [2, 3] };
        let mesh = fsdp::Mesh::new(&context, &fsdp::MeshOptions::new().ranks(&half)).unwrap();
        let mut values = [rank];
        context.all_reduce_values_over(&mesh, &mut values, ValueOp::Sum).unwrap();
        assert_eq!(values, [if context.rank() < 2 { 1.0 } else { 5.0 }]);
        let model = Model::new(&context, &ModelOptions::new().mesh(&mesh)).unwrap();
        drop(mesh);
        drop(model);
        context.close().unwrap();
    });
}

/// Lets rank 1 go, also where rank 0 has panicked.
struct Done<'a>(&'a AtomicI32);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Release);
    }
}

/// Rank 0 waits for a peer that never comes; the context's own means end the wait.
fn wait_for_nobody(options: &ContextOptions, meanwhile: impl Fn(&Context) + Sync) -> (fsdp::Error, Duration) {
    let found = Mutex::new(None);
    let done = AtomicI32::new(0);
    run_ranks_with(2, options, |context| {
        if context.rank() == 0 {
            let _done = Done(&done);
            meanwhile(&context);
            let began = Instant::now();
            let error = context.all_reduce_values(&mut [1.0], ValueOp::Sum).unwrap_err();
            *found.lock().unwrap() = Some((error, began.elapsed()));
        } else {
            while done.load(Ordering::Acquire) == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    found.into_inner().unwrap().expect("rank 0 has waited")
}

#[test]
fn a_flag_and_a_hook_interrupt_a_wait() {
    let flag = Arc::new(AtomicI32::new(0));
    let set_later = |_: &Context| {
        let flag = flag.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            flag.store(1, Ordering::Release);
        });
    };
    let (error, waited) = wait_for_nobody(&ContextOptions::new().interrupted_flag(flag.clone()), set_later);
    assert_eq!(error.status, Status::Interrupted);
    assert!(waited < Duration::from_secs(5), "{waited:?}"); // without the flag: 300 s

    let asked = Arc::new(AtomicU32::new(0));
    let count = asked.clone();
    let options = ContextOptions::new().interrupted(move || count.fetch_add(1, Ordering::Relaxed) >= 3);
    let (error, _) = wait_for_nobody(&options, |_| ());
    assert_eq!(error.status, Status::Interrupted);
    assert!(asked.load(Ordering::Relaxed) >= 4);
}

#[test]
fn a_handle_aborts_from_another_thread() {
    let (error, _) = wait_for_nobody(&ContextOptions::new(), |context| {
        let handle = context.abort_handle();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            handle.abort("the user has left").unwrap();
        });
    });
    assert_eq!(error.status, Status::Aborted);
    assert!(error.context_failed);
    assert!(error.message.contains("the user has left"), "{error}");
    let context = Context::local(1, &Default::default()).unwrap().remove(0);
    let handle = context.abort_handle();
    assert!(context.error().unwrap().is_none());
    drop(context);
    assert_eq!(handle.abort("too late").unwrap_err().status, Status::InvalidHandle);
}

#[test]
fn a_panic_of_a_hook_comes_out_of_the_call() {
    let options = ContextOptions::new().interrupted(|| std::panic::resume_unwind(Box::new(42u32)));
    let done = AtomicI32::new(0);
    run_ranks_with(2, &options, |context| {
        while context.rank() == 1 && done.load(Ordering::Acquire) == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        if context.rank() == 0 {
            let _done = Done(&done);
            let wait = std::panic::AssertUnwindSafe(|| context.all_reduce_values(&mut [1.0], ValueOp::Sum));
            let payload = std::panic::catch_unwind(wait).expect_err("the hook has panicked");
            assert_eq!(payload.downcast_ref(), Some(&42u32));
            context.abort("seen").unwrap(); // no later call panics
        }
    });
}

#[test]
fn a_panic_of_the_log_leaves_the_window_as_the_library_has_it() {
    let armed = Arc::new(AtomicI32::new(0));
    let kept = armed.clone();
    let options = ContextOptions::new().log_level(LogLevel::Debug).log(move |_, _| {
        if kept.swap(0, Ordering::Relaxed) == 1 {
            std::panic::resume_unwind(Box::new("the log is full"));
        }
    });
    run_ranks_with(1, &options, |context| {
        let (mut model, _, _) = two_groups(&context, &ModelOptions::new());
        let window = model.begin_update().unwrap();
        armed.store(1, Ordering::Relaxed);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| window.discard())).is_err());
        assert_eq!(model.window().map(drop).unwrap_err().status, Status::InvalidState); // the weights are shared again
        let mut other = Model::new(&context, &ModelOptions::new()).unwrap();
        other.create_group("g", &[Param::new("w", &[4])], &Default::default()).unwrap();
        armed.store(1, Ordering::Relaxed);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| other.seal().map(drop))).is_err());
        other.window().unwrap().publish().unwrap();
    });
}

#[test]
fn log_lines_come_to_the_hook() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let kept = lines.clone();
    let options = ContextOptions::new().log_level(LogLevel::Debug).log(move |level, line| {
        kept.lock().unwrap().push((level, line.to_string()));
    });
    run_ranks_with(1, &options, |context| {
        let (model, _, _) = two_groups(&context, &ModelOptions::new());
        drop(model);
        context.close().unwrap();
    });
    let lines = lines.lock().unwrap();
    assert!(lines.iter().any(|(level, _)| matches!(level, LogLevel::Info | LogLevel::Debug)), "{lines:?}");
}

#[test]
fn the_build_and_the_version_are_told() {
    assert_eq!(fsdp::get_version().split('.').take(2).collect::<Vec<_>>(), ["0", "2"]);
    assert!(fsdp::describe_build().unwrap().contains(&fsdp::get_version()));
}
