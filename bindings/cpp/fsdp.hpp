// SPDX-License-Identifier: Apache-2.0
//
// fsdp.hpp - libfsdp in C++17: objects that close with their scope, views that look like std::span, exceptions.
//
// The names are those of fsdp.h without their prefix, and its docstrings are the manual: which ranks must make a call,
// what it waits for, how it fails. A failure is an fsdp::Error, which carries the fsdp_error. Options are the header's
// structs with struct_size set (fsdp::ModelOptions is an fsdp_model_options). README.md has a training program.
//
// Handles move and do not copy; those of fsdp::Group copy, since a group belongs to its model and ends with it. A
// handle that was moved from, or whose context has gone, throws INVALID_HANDLE where it is used. They may end in any
// order.
#ifndef FSDP_HPP
#define FSDP_HPP

#include "fsdp/capture.hpp"
#include "fsdp/checkpoint.hpp"
#include "fsdp/context.hpp"
#include "fsdp/group.hpp"
#include "fsdp/matrices.hpp"
#include "fsdp/model.hpp"
#include "fsdp/shard.hpp"

#endif
