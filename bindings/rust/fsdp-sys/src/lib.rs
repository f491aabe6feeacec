// SPDX-License-Identifier: Apache-2.0
//! The calls, structs and constants of libfsdp's header `fsdp.h`, with its names and docstrings. The crate `fsdp` makes a
//! safe interface of them. All but this file is written by `bindings/rust/generate.py`.
//!
//! `Default` of a struct is its `FSDP_X_INIT`: zero, and `struct_size` where it has one.
#![allow(non_camel_case_types)]

#[rustfmt::skip]
mod calls;
#[rustfmt::skip]
mod structs;
#[rustfmt::skip]
mod types;

pub use calls::*;
pub use structs::*;
pub use types::*;
