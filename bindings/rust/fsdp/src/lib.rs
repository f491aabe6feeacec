// SPDX-License-Identifier: Apache-2.0
//! Fully sharded data parallel training: libfsdp keeps a model's parameters, gradients and optimizer state sharded over
//! ranks; your code does the math on slices of its memory.
//!
//! ```
//! use fsdp::{Context, ContextOptions, Model, ModelOptions, Param, Phase};
//! # fn main() -> fsdp::Result<()> {
//! let context = Context::new(&ContextOptions::new())?; // rank and world size from fsdp-run
//! let mut model = Model::new(&context, &ModelOptions::new())?;
//! let layer = model.create_group("layer", &[Param::new("weight", &[4, 8])], &Default::default())?;
//! let mut window = model.seal()?;
//! window.load_param(layer, "weight", &[0f32; 32])?;
//! window.publish()?;
//! for _ in 0..100 {
//!     let mut grads = model.grads(layer)?;
//!     {
//!         let weights = model.unshard(layer, Phase::Backward)?;
//!         let w: &[f32] = weights.get("weight")?;
//!         for (g, w) in grads.get("weight")?.data.iter_mut().zip(w) {
//!             *g = w - 1.0; // the loss is sum (w - 1)^2 / 2
//!         }
//!     } // resharded here
//!     grads.reduce_last()?;
//!     model.finish_grads(1.0)?.step_adamw(0.1, &Default::default())?;
//! }
//! context.close()
//! # }
//! ```
//!
//! What the library would find at run time, the borrow checker finds first. These do not compile: a view that outlives its
//! reshard, `finish_grads` with a live view, a gradient after its reduce, and a model that is dropped under a view. See
//! [`Weights`], [`Grads`] and [`Window`].
//!
//! The names are those of `fsdp.h` without their prefix, and its docstrings, which [`sys`] has, are the manual: which ranks must make
//! a call, what it waits for, how it fails. Handles are [`Send`] and not [`Sync`]: one thread at a time inside a context.
//! Slices are of memory of the host: on a GPU a view gives its address alone ([`Weights::tensor`]).
#![warn(missing_docs)]

pub use fsdp_sys as sys;

mod capture;
mod checkpoint;
mod context;
#[rustfmt::skip]
mod enums;
mod error;
mod grads;
mod group;
mod hooks;
mod matrices;
mod mesh;
mod model;
#[rustfmt::skip]
mod options;
mod param;
mod schedule;
mod shard;
mod tensor;
mod weights;
mod window;

pub use capture::Capture;
pub use checkpoint::{list_checkpoints, Checkpoint, CheckpointStatus, Loaded, Rename};
pub use context::{describe_build, get_version, AbortHandle, Context};
pub use enums::*;
pub use error::{get_last_message, Error, Result};
pub use grads::{FullGrad, Grad, Grads};
pub use group::{Group, GroupInfo};
pub use matrices::{Matrices, Matrix};
pub use mesh::Mesh;
pub use model::{Chunk, Model, ModelInfo, Stats};
pub use options::*;
pub use param::{Param, ParamInfo, ParamKey};
pub use schedule::Schedule;
pub use shard::{MainWeight, Shard, ShardChunks, State};
pub use tensor::{Bf16, E4m3, Element, ScaleE8m0, Tensor, F16};
pub use weights::Weights;
pub use window::Window;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
