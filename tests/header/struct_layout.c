/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The size and every offset of each public struct, on a 64-bit machine. A failure here means that programs compiled
 * with an older header would break: docs/contracts/abi-stability.md has the rule (append only). When a release appends
 * a field, add its line; never change one.
 */
#include <stddef.h>

#include <fsdp.h>

#ifdef __cplusplus
#define CHECK(condition) static_assert(condition, #condition)
#else
#define CHECK(condition) _Static_assert(condition, #condition)
#endif
#define SIZE(type, bytes) CHECK(sizeof(type) == (bytes))
#define AT(type, field, offset) CHECK(offsetof(type, field) == (offset))

CHECK(sizeof(void *) == 8);

SIZE(fsdp_error, 1056);
AT(fsdp_error, struct_size, 0);
AT(fsdp_error, status, 8);
AT(fsdp_error, origin, 12);
AT(fsdp_error, origin_code, 16);
AT(fsdp_error, rank, 24);
AT(fsdp_error, context_failed, 28);
AT(fsdp_error, message, 32);

SIZE(fsdp_tensor, 56);
AT(fsdp_tensor, struct_size, 0);
AT(fsdp_tensor, data, 8);
AT(fsdp_tensor, shape, 16);
AT(fsdp_tensor, element_count, 24);
AT(fsdp_tensor, dimension_count, 32);
AT(fsdp_tensor, dtype, 36);
AT(fsdp_tensor, element_size, 40);
AT(fsdp_tensor, flags, 44);
AT(fsdp_tensor, device, 48);
AT(fsdp_tensor, device_index, 52);

SIZE(fsdp_context_options, 144);
AT(fsdp_context_options, struct_size, 0);
AT(fsdp_context_options, flags, 8);
AT(fsdp_context_options, world_size, 12);
AT(fsdp_context_options, rank, 16);
AT(fsdp_context_options, ranks_per_host, 20);
AT(fsdp_context_options, rendezvous, 24);
AT(fsdp_context_options, device, 32);
AT(fsdp_context_options, device_index, 36);
AT(fsdp_context_options, device_transport, 40);
AT(fsdp_context_options, timeout_ms, 44);
AT(fsdp_context_options, heartbeat_timeout_ms, 48);
AT(fsdp_context_options, log_level, 52);
AT(fsdp_context_options, interrupted_flag, 56);
AT(fsdp_context_options, interrupted, 64);
AT(fsdp_context_options, interrupted_data, 72);
AT(fsdp_context_options, log, 80);
AT(fsdp_context_options, log_data, 88);
AT(fsdp_context_options, trace_directory, 96);
AT(fsdp_context_options, trace_events, 104);
AT(fsdp_context_options, flight_directory, 112);
AT(fsdp_context_options, flight_events, 120);
AT(fsdp_context_options, debug_delay_us, 124);
AT(fsdp_context_options, debug_delay_seed, 128);
AT(fsdp_context_options, debug_failed_allocation, 136);

SIZE(fsdp_mesh_options, 32);
AT(fsdp_mesh_options, struct_size, 0);
AT(fsdp_mesh_options, replicate_size, 8);
AT(fsdp_mesh_options, shard_size, 12);
AT(fsdp_mesh_options, ranks, 16);
AT(fsdp_mesh_options, rank_count, 24);
AT(fsdp_mesh_options, reduction_block_size, 28);

SIZE(fsdp_model_options, 168);
AT(fsdp_model_options, struct_size, 0);
AT(fsdp_model_options, mesh, 8);
AT(fsdp_model_options, flags, 16);
AT(fsdp_model_options, strategy, 20);
AT(fsdp_model_options, outer_strategy, 24);
AT(fsdp_model_options, unshard_mode, 28);
AT(fsdp_model_options, grad_dtype, 32);
AT(fsdp_model_options, reduce_dtype, 36);
AT(fsdp_model_options, grad_op, 40);
AT(fsdp_model_options, reduce_policy, 44);
AT(fsdp_model_options, grad_factor, 48);
AT(fsdp_model_options, optimizer, 56);
AT(fsdp_model_options, max_pending_groups, 60);
AT(fsdp_model_options, prefetch_depth, 64);
AT(fsdp_model_options, view_kind, 68);
AT(fsdp_model_options, prefetch_bytes, 72);
AT(fsdp_model_options, save_staging_bytes, 80);
AT(fsdp_model_options, scale_rounding, 88);
AT(fsdp_model_options, quantize_from, 92);
AT(fsdp_model_options, scale_rule, 96);
AT(fsdp_model_options, plane_policy, 100);
AT(fsdp_model_options, max_pending_bytes, 104);
AT(fsdp_model_options, main_storage, 112);
AT(fsdp_model_options, reserved, 116);
AT(fsdp_model_options, rounding_seed, 120);
AT(fsdp_model_options, matrix_bytes, 128);
AT(fsdp_model_options, state_home, 136);
AT(fsdp_model_options, main_home, 140);
AT(fsdp_model_options, home_directory, 144);
AT(fsdp_model_options, turn_bytes, 152);
AT(fsdp_model_options, turns, 160);
AT(fsdp_model_options, grad_home, 164);

SIZE(fsdp_visit, 12);
AT(fsdp_visit, group_index, 0);
AT(fsdp_visit, phase, 4);
AT(fsdp_visit, piece, 8);

SIZE(fsdp_schedule_options, 40);
AT(fsdp_schedule_options, struct_size, 0);
AT(fsdp_schedule_options, visits, 8);
AT(fsdp_schedule_options, visit_count, 16);
AT(fsdp_schedule_options, visit_stride, 24);
AT(fsdp_schedule_options, held_groups, 32);
AT(fsdp_schedule_options, reserved, 36);

SIZE(fsdp_model_info, 80);
AT(fsdp_model_info, struct_size, 0);
AT(fsdp_model_info, group_count, 8);
AT(fsdp_model_info, param_count, 16);
AT(fsdp_model_info, element_count, 24);
AT(fsdp_model_info, padding_count, 32);
AT(fsdp_model_info, gather_pool_bytes, 40);
AT(fsdp_model_info, gather_lower_bound_bytes, 48);
AT(fsdp_model_info, reduce_pool_bytes, 56);
AT(fsdp_model_info, reduce_lower_bound_bytes, 64);
AT(fsdp_model_info, layout_hash, 72);

SIZE(fsdp_stats, 280);
AT(fsdp_stats, struct_size, 0);
AT(fsdp_stats, version, 8);
AT(fsdp_stats, step, 16);
AT(fsdp_stats, gathers, 24);
AT(fsdp_stats, all_gathers, 32);
AT(fsdp_stats, gathered_bytes, 40);
AT(fsdp_stats, gathered_groups, 48);
AT(fsdp_stats, peak_gathered_groups, 56);
AT(fsdp_stats, prefetches, 64);
AT(fsdp_stats, dropped_prefetches, 72);
AT(fsdp_stats, reduces, 80);
AT(fsdp_stats, reduced_bytes, 88);
AT(fsdp_stats, reduce_scatters, 96);
AT(fsdp_stats, reduce_scatter_bytes, 104);
AT(fsdp_stats, all_reduces, 112);
AT(fsdp_stats, all_reduce_bytes, 120);
AT(fsdp_stats, pending_grad_groups, 128);
AT(fsdp_stats, peak_pending_grad_groups, 136);
AT(fsdp_stats, outer_all_gathers, 144);
AT(fsdp_stats, outer_reduce_scatters, 152);
AT(fsdp_stats, outer_all_reduces, 160);
AT(fsdp_stats, outer_sent_bytes, 168);
AT(fsdp_stats, wait_ns, 176);
AT(fsdp_stats, gather_wait_ns, 184);
AT(fsdp_stats, reduce_wait_ns, 192);
AT(fsdp_stats, peer_wait_ns, 200);
AT(fsdp_stats, last_rank_lag_ns, 208);
AT(fsdp_stats, last_rank, 216);
AT(fsdp_stats, reserved, 220);
AT(fsdp_stats, allocations, 224);
AT(fsdp_stats, checkpoint_stall_ns, 232);
AT(fsdp_stats, gathered_row_bytes, 240);
AT(fsdp_stats, gathered_column_bytes, 248);
AT(fsdp_stats, home_read_bytes, 256);
AT(fsdp_stats, home_written_bytes, 264);
AT(fsdp_stats, home_wait_ns, 272);

SIZE(fsdp_param, 120);
AT(fsdp_param, struct_size, 0);
AT(fsdp_param, name, 8);
AT(fsdp_param, shape, 16);
AT(fsdp_param, dimension_count, 24);
AT(fsdp_param, dtype, 28);
AT(fsdp_param, flags, 32);
AT(fsdp_param, granule, 36);
AT(fsdp_param, granule_rows, 40);
AT(fsdp_param, lr_scale, 48);
AT(fsdp_param, user_data, 56);
AT(fsdp_param, global_shape, 64);
AT(fsdp_param, global_offset, 72);
AT(fsdp_param, quantization, 80);
AT(fsdp_param, missing_grad, 84);
AT(fsdp_param, row_dimensions, 88);
AT(fsdp_param, piece, 92);
AT(fsdp_param, optimizer, 96);
AT(fsdp_param, matrix, 100);
AT(fsdp_param, matrix_splits, 104);
AT(fsdp_param, matrix_split_count, 112);

SIZE(fsdp_group_options, 56);
AT(fsdp_group_options, struct_size, 0);
AT(fsdp_group_options, flags, 8);
AT(fsdp_group_options, strategy, 12);
AT(fsdp_group_options, grad_dtype, 16);
AT(fsdp_group_options, reduce_dtype, 20);
AT(fsdp_group_options, main_storage, 24);
AT(fsdp_group_options, backward_weights, 28);
AT(fsdp_group_options, mesh, 32);
AT(fsdp_group_options, grad_op, 40);
AT(fsdp_group_options, outer_strategy, 44);
AT(fsdp_group_options, grad_factor, 48);

SIZE(fsdp_group_info, 88);
AT(fsdp_group_info, struct_size, 0);
AT(fsdp_group_info, name, 8);
AT(fsdp_group_info, param_count, 16);
AT(fsdp_group_info, group_index, 24);
AT(fsdp_group_info, flags, 28);
AT(fsdp_group_info, strategy, 32);
AT(fsdp_group_info, reduce_policy, 36);
AT(fsdp_group_info, grad_dtype, 40);
AT(fsdp_group_info, reduce_dtype, 44);
AT(fsdp_group_info, main_storage, 48);
AT(fsdp_group_info, backward_weights, 52);
AT(fsdp_group_info, piece_count, 56);
AT(fsdp_group_info, replicate_size, 64);
AT(fsdp_group_info, shard_size, 68);
AT(fsdp_group_info, grad_op, 72);
AT(fsdp_group_info, outer_strategy, 76);
AT(fsdp_group_info, grad_factor, 80);

SIZE(fsdp_chunk, 40);
AT(fsdp_chunk, struct_size, 0);
AT(fsdp_chunk, element_offset, 8);
AT(fsdp_chunk, element_count, 16);
AT(fsdp_chunk, row_offset, 24);
AT(fsdp_chunk, row_count, 32);

SIZE(fsdp_shard, 104);
AT(fsdp_shard, struct_size, 0);
AT(fsdp_shard, group, 8);
AT(fsdp_shard, param_index, 16);
AT(fsdp_shard, name, 24);
AT(fsdp_shard, main_weight, 32);
AT(fsdp_shard, main_grad, 40);
AT(fsdp_shard, main_weight_dtype, 48);
AT(fsdp_shard, main_grad_dtype, 52);
AT(fsdp_shard, element_offset, 56);
AT(fsdp_shard, element_count, 64);
AT(fsdp_shard, row_offset, 72);
AT(fsdp_shard, row_count, 80);
AT(fsdp_shard, lr_scale, 88);
AT(fsdp_shard, flags, 96);
AT(fsdp_shard, state_count, 100);

SIZE(fsdp_matrix, 104);
AT(fsdp_matrix, struct_size, 0);
AT(fsdp_matrix, group, 8);
AT(fsdp_matrix, name, 16);
AT(fsdp_matrix, param_index, 24);
AT(fsdp_matrix, batch_index, 32);
AT(fsdp_matrix, split_index, 40);
AT(fsdp_matrix, row_offset, 48);
AT(fsdp_matrix, rows, 56);
AT(fsdp_matrix, columns, 64);
AT(fsdp_matrix, count, 72);
AT(fsdp_matrix, stride_bytes, 80);
AT(fsdp_matrix, data, 88);
AT(fsdp_matrix, dtype, 96);
AT(fsdp_matrix, reserved, 100);
SIZE(fsdp_matrix_options, 32);
AT(fsdp_matrix_options, struct_size, 0);
AT(fsdp_matrix_options, source, 8);
AT(fsdp_matrix_options, target, 16);
AT(fsdp_matrix_options, dtype, 24);
AT(fsdp_matrix_options, reserved, 28);
SIZE(fsdp_adamw_options, 56);
AT(fsdp_adamw_options, struct_size, 0);
AT(fsdp_adamw_options, beta1, 8);
AT(fsdp_adamw_options, beta2, 16);
AT(fsdp_adamw_options, epsilon, 24);
AT(fsdp_adamw_options, weight_decay, 32);
AT(fsdp_adamw_options, step, 40);
AT(fsdp_adamw_options, flags, 48);
AT(fsdp_adamw_options, reserved, 52);

SIZE(fsdp_grad, 24);
AT(fsdp_grad, data, 0);
AT(fsdp_grad, element_count, 8);
AT(fsdp_grad, dtype, 16);
AT(fsdp_grad, reserved, 20);

SIZE(fsdp_save_options, 24);
AT(fsdp_save_options, struct_size, 0);
AT(fsdp_save_options, step, 8);
AT(fsdp_save_options, keep, 16);
AT(fsdp_save_options, flags, 20);

SIZE(fsdp_load_options, 16);
AT(fsdp_load_options, struct_size, 0);
AT(fsdp_load_options, flags, 8);
AT(fsdp_load_options, reserved, 12);

SIZE(fsdp_checkpoint_status, 80);
AT(fsdp_checkpoint_status, struct_size, 0);
AT(fsdp_checkpoint_status, state, 8);
AT(fsdp_checkpoint_status, status, 12);
AT(fsdp_checkpoint_status, bytes, 16);
AT(fsdp_checkpoint_status, bytes_in_all, 24);
AT(fsdp_checkpoint_status, step, 32);
AT(fsdp_checkpoint_status, ranks, 40);
AT(fsdp_checkpoint_status, reserved, 44);
AT(fsdp_checkpoint_status, name, 48);

SIZE(fsdp_loaded, 104);
AT(fsdp_loaded, struct_size, 0);
AT(fsdp_loaded, step, 8);
AT(fsdp_loaded, sequence, 16);
AT(fsdp_loaded, wanted_bytes, 24);
AT(fsdp_loaded, read_bytes, 32);
AT(fsdp_loaded, ranks, 40);
AT(fsdp_loaded, passed_over, 44);
AT(fsdp_loaded, name, 48);
AT(fsdp_loaded, loaded_tensors, 80);
AT(fsdp_loaded, missing_tensors, 88);
AT(fsdp_loaded, unexpected_tensors, 96);

SIZE(fsdp_rename, 48);
AT(fsdp_rename, theirs, 0);
AT(fsdp_rename, ours, 8);
AT(fsdp_rename, from_row, 16);
AT(fsdp_rename, to_row, 24);
AT(fsdp_rename, row_count, 32);
AT(fsdp_rename, flags, 40);
AT(fsdp_rename, reserved, 44);