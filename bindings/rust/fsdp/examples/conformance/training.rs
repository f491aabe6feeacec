// SPDX-License-Identifier: Apache-2.0
//! The calls of a step. Holds last from line to line, longer than a guard can: they are leaked by unshard, read by a guard of
//! their own, and returned by the model's reshard.
use crate::line::Line;
use crate::rank::{as_bytes, crc32, crc_of, crc_of_doubles, nothing, piece, status, Rank};
use fsdp::{
    sys, AdamwOptions, Bf16, Dtype, E4m3, Element, FullGrad, Grad, Matrix, MatrixOptions, Phase, Plane, Result,
    ScaleE8m0, Weights, Window, F16,
};
use std::ptr::null_mut;

impl Rank {
    pub fn train(&mut self, line: &Line) -> Option<Result<String>> {
        let name = line.word(1);
        Some(match line.word(0) {
            "seal_model" => nothing(self.model(name).and_then(|model| model.seal().map(drop))),
            "unshard" => nothing(self.unshard(line)),
            "reshard" => nothing(self.reshard(line)),
            "prefetch" => nothing(
                self.of_group(line).and_then(|(model, group)| model.prefetch(group, phase(line).expect("a phase"))),
            ),
            "restore_view" => nothing(self.of_group(line).and_then(|(model, group)| model.restore_view(group))),
            "get_param" => self.get_param(line),
            "get_params" => self.get_params(line),
            "get_plane" => self.get_plane(line),
            "swizzle_scales" => self.swizzle_scales(line),
            "acquire_grad" => nothing(self.acquire_grad(line)),
            "acquire_grads" => nothing(self.acquire_grads(line)),
            "put_grad" => nothing(self.put_grad(line)),
            "complete_grad" => nothing(self.complete_grad(line)),
            "reduce_grad" => nothing(self.reduce_grad(line)),
            "finish_grads" => nothing(self.model(name).and_then(|model| match line.key_integer("flags") {
                None | Some(0) => model.finish_grads(line.number(2)).map(drop),
                _ => model.finish_last_grads(line.number(2)).map(drop),
            })),
            "begin_update" => nothing(self.model(name).and_then(|model| model.begin_update().map(drop))),
            "discard_step" => nothing(self.model(name).and_then(|model| model.discard_step())),
            "check_replicas" => nothing(self.model(name).and_then(|model| model.check_replicas())),
            "get_stats" => self.get_stats(line),
            "get_model_info" => self.get_model_info(line),
            "apply_grads" => self.apply_grads(line),
            "get_param_weight_norms" => {
                self.model(name).and_then(|model| Ok(crc_of_doubles(&model.param_weight_norms()?)))
            }
            _ => return self.in_window(line),
        })
    }

    fn in_window(&mut self, line: &Line) -> Option<Result<String>> {
        let model = self.model(line.word(1));
        let x = line.word(2).parse().unwrap_or(0.0);
        Some(match line.word(0) {
            "round_stochastic" => nothing(self.round_stochastic(line)),
            "change_matrices" => nothing(model.and_then(|model| change_matrices(&mut model.window()?, line))),
            "collect_matrices" => {
                nothing(model.and_then(|model| model.window()?.collect_matrices(&matrix_options(line)).map(drop)))
            }
            "publish_weights" => nothing(model.and_then(|model| model.window()?.publish())),
            "step_adamw" => nothing(model.and_then(|model| model.window()?.step_adamw(x, &adamw_options(line)))),
            "scale_grads" => nothing(model.and_then(|model| model.window()?.scale_grads(x))),
            "get_grad_norm" => model.and_then(|model| Ok(hex_of(model.window()?.grad_norm()?))),
            "get_param_grad_norms" => model.and_then(|model| Ok(crc_of_doubles(&model.window()?.param_grad_norms()?))),
            "count_zero_grads" => model.and_then(|model| Ok(model.window()?.count_zero_grads()?.to_string())),
            "clip_grads" => model.and_then(|model| Ok(hex_of(model.window()?.clip_grads(x)?))),
            "check_grads" => {
                model.and_then(|model| Ok(u32::from(model.window()?.check_grads()?.is_some()).to_string()))
            }
            _ => return None,
        })
    }

    // ---- weights ------------------------------------------------------------------------------------------------

    fn unshard(&mut self, line: &Line) -> Result<()> {
        let (model, group) = self.of_group(line)?;
        match phase(line) {
            Some(phase) => {
                std::mem::forget(match piece(line) {
                    Some(piece) => model.unshard_piece(group, piece, phase)?,
                    None => model.unshard(group, phase)?,
                });
                Ok(())
            }
            None => {
                let raw = model.group_as_raw(group)?;
                status(unsafe { sys::fsdp_unshard(raw, line.integer(2) as i32, 0, null_mut()) })
            }
        }
    }

    fn reshard(&mut self, line: &Line) -> Result<()> {
        let (model, group) = self.of_group(line)?;
        let phase = phase(line).expect("a phase");
        // SAFETY: views end with get_param and get_params, below.
        unsafe {
            match piece(line) {
                Some(piece) => model.reshard_piece(group, piece, phase),
                None => model.reshard(group, phase),
            }
        }
    }

    /// A second hold of the piece, for the time of the call; where there is no first one, views without a hold.
    fn get_param(&mut self, line: &Line) -> Result<String> {
        let (index, phase) = (line.integer(2) as usize, Phase::from_raw(line.integer(3) as i32).expect("a phase"));
        let piece = self.named(line.word(1)).params[index].piece;
        let (model, group) = self.of_group(line)?;
        model.param(group, index, phase)?; // not unsharded: the library says so
        Ok(format!("{:08x}", add_view(0, &model.unshard_piece(group, piece, phase)?, index)?))
    }

    /// A second hold, for the time of the call; where there is no first one, views without a hold.
    fn get_params(&mut self, line: &Line) -> Result<String> {
        let (model, group) = self.of_group(line)?;
        let phase = phase(line).expect("a phase");
        model.param(group, 0, phase)?; // not unsharded: the library says so
        let weights = model.unshard(group, phase)?;
        let mut crc = 0;
        for index in weights.indices() {
            crc = add_view(crc, &weights, index)?;
        }
        Ok(format!("{crc:08x}"))
    }

    /// Of MXFP8.
    fn get_plane(&mut self, line: &Line) -> Result<String> {
        self.with_plane(line, |weights, index, plane| match plane {
            Plane::Row | Plane::Column => Ok(crc_of(weights.plane::<E4m3>(index, plane)?)),
            _ => Ok(crc_of(weights.plane::<ScaleE8m0>(index, plane)?)),
        })
    }

    fn swizzle_scales(&mut self, line: &Line) -> Result<String> {
        self.with_plane(line, |weights, index, plane| Ok(crc_of(&weights.swizzled_scales(index, plane)?)))
    }

    /// In a second hold, of the phase that holds the group.
    fn with_plane(
        &mut self,
        line: &Line,
        look: impl Fn(&Weights<'_>, usize, Plane) -> Result<String>,
    ) -> Result<String> {
        let (model, group) = self.of_group(line)?;
        let phase = Phase::from_raw(line.integer(3) as i32).expect("a phase");
        let plane = Plane::from_raw(line.integer(4) as i32).expect("a plane");
        let weights = model.unshard(group, phase)?;
        look(&weights, line.integer(2) as usize, plane)
    }

    // ---- gradients ----------------------------------------------------------------------------------------------

    fn acquire_grad(&mut self, line: &Line) -> Result<()> {
        let index = line.integer(2) as usize;
        let values = self.array(line, 3, 0, self.element_count(line));
        let (model, group) = self.of_group(line)?;
        let dtype = match model.group_info(group)?.grad_dtype {
            Some(dtype) => dtype,
            None => model.param_info(group, index)?.dtype,
        };
        let mut grads = model.grads(group)?;
        match dtype {
            Dtype::Bfloat16 => grads.get::<Bf16>(index)?.data.copy_from_slice(&upper_halves(&values)),
            Dtype::Float16 => grads.get::<F16>(index)?.data.copy_from_slice(&halves(&values)),
            _ => write(grads.get::<f32>(index)?, &values),
        }
        Ok(())
    }

    fn acquire_grads(&mut self, line: &Line) -> Result<()> {
        let frozen: Vec<bool> = self.named(line.word(1)).params.iter().map(|param| param.is_frozen()).collect();
        let counts: Vec<usize> = self.named(line.word(1)).params.iter().map(|param| param.element_count()).collect();
        let values: Vec<_> =
            counts.iter().enumerate().map(|(p, count)| self.array(line, 2, p as i64, *count)).collect();
        let (model, group) = self.of_group(line)?;
        let mut grads = model.grads(group)?;
        for (index, values) in values.iter().enumerate().filter(|(index, _)| !frozen[*index]) {
            grads.get_zeroed::<f32>(index)?.iter_mut().zip(values).for_each(|(to, value)| *to += value);
        }
        Ok(())
    }

    fn put_grad(&mut self, line: &Line) -> Result<()> {
        let index = line.integer(2) as usize;
        let values = (line.word(3) != "none").then(|| self.array(line, 3, 0, self.element_count(line)));
        let (model, group) = self.of_group(line)?;
        let mut grads = model.grads(group)?;
        match (values, line.key_integer("dtype")) {
            (None, _) => grads.put::<f32>(index, None),
            (Some(values), Some(2)) => grads.put(index, Some(&upper_halves(&values)[..])),
            (Some(values), Some(3)) => grads.put(index, Some(&halves(&values)[..])),
            (Some(values), _) => grads.put(index, Some(&values[..])),
        }
    }

    fn complete_grad(&mut self, line: &Line) -> Result<()> {
        let index = line.integer(2) as usize;
        let (model, group) = self.of_group(line)?;
        model.grads(group)?.complete(index)
    }

    fn reduce_grad(&mut self, line: &Line) -> Result<()> {
        let (model, group) = self.of_group(line)?;
        match line.key_integer("flags").unwrap_or(0) as u32 {
            0 => model.grads(group)?.reduce(),
            sys::FSDP_LAST => model.grads(group)?.reduce_last(),
            flags => status(unsafe { sys::fsdp_reduce_grad(model.group_as_raw(group)?, flags, null_mut()) }),
        }
    }

    // ---- the rest -----------------------------------------------------------------------------------------------

    fn round_stochastic(&mut self, line: &Line) -> Result<()> {
        let (index, step) = (line.integer(3) as usize, line.integer(4) as u64);
        let count = self.named(line.word(2)).params[index].element_count();
        let (values, group) = (self.array(line, 5, 0, count), self.named(line.word(2)).group);
        for mut shard in self.model(line.word(1))?.window()?.shards()? {
            if Some(shard.group) == group && shard.param_index == index {
                let first = shard.element_offset as usize;
                let own = values[first..first + shard.main_grad.len()].to_vec();
                shard.round_stochastic(0, &own, step)?;
            }
        }
        Ok(())
    }

    fn apply_grads(&mut self, line: &Line) -> Result<String> {
        let params = self.groups.iter().flat_map(|(_, group)| &group.params).filter(|param| !param.is_frozen());
        let values: Vec<_> =
            params.enumerate().map(|(j, param)| self.array(line, 4, j as i64, param.element_count())).collect();
        let grads: Vec<_> = values.iter().map(|values| FullGrad::new(values)).collect();
        let (lr, max_norm, options) = (line.number(2), line.number(3), adamw_options(line));
        Ok(hex_of(self.model(line.word(1))?.apply_grads(&grads, lr, max_norm, &options)?))
    }

    fn get_stats(&mut self, line: &Line) -> Result<String> {
        let stats = self.model(line.word(1))?.stats()?;
        Ok(match line.word(2) {
            "version" => stats.version,
            "step" => stats.step,
            "reduces" => stats.reduces,
            "gathered_groups" => stats.gathered_groups,
            "pending_grad_groups" => stats.pending_grad_groups,
            field => panic!("unknown field: {field}"),
        }
        .to_string())
    }

    fn get_model_info(&mut self, line: &Line) -> Result<String> {
        let info = self.model(line.word(1))?.info()?;
        Ok(match line.word(2) {
            "group_count" => info.group_count,
            "param_count" => info.param_count,
            "element_count" => info.element_count,
            field => panic!("unknown field: {field}"),
        }
        .to_string())
    }
}

fn phase(line: &Line) -> Option<Phase> {
    Phase::from_raw(line.integer(2) as i32)
}

fn adamw_options(line: &Line) -> AdamwOptions {
    let number = |key| line.key_number(key).unwrap_or(0.0);
    let options = AdamwOptions::new().beta1(number("beta1")).beta2(number("beta2")).epsilon(number("epsilon"));
    options.weight_decay(number("weight_decay")).step(line.key_integer("step").unwrap_or(0) as u64)
}

fn matrix_options(line: &Line) -> MatrixOptions {
    let mut options = MatrixOptions::new();
    if let Some(source) = line.key("source") {
        options = options.source(source);
    }
    if let Some(target) = line.key("target") {
        options = options.target(target);
    }
    match line.key_integer("dtype").and_then(|raw| Dtype::from_raw(raw as i32)) {
        Some(dtype) => options.dtype(dtype),
        None => options,
    }
}

fn change_matrices(window: &mut Window<'_>, line: &Line) -> Result<()> {
    let mut matrices = window.collect_matrices(&matrix_options(line))?;
    while let Some(mut matrix) = matrices.next()? {
        for number in 0..matrix.count {
            match matrix.dtype {
                Dtype::Bfloat16 => change_matrix(&mut matrix, number, |x: Bf16, by| Bf16::from(f32::from(x) * by))?,
                _ => change_matrix(&mut matrix, number, |x: f32, by| x * by)?,
            }
        }
    }
    matrices.give_back()
}

/// The last row comes first, and numbers are multiplied by a power of two: they stay exact in bfloat16.
fn change_matrix<T: Element>(matrix: &mut Matrix<'_>, number: usize, scale: impl Fn(T, f32) -> T) -> Result<()> {
    let batch = matrix.batch_index + number as u64;
    let exponent = (matrix.param_index as u64 + 2 * matrix.split_index + batch) % 4;
    let columns = matrix.columns;
    let numbers = matrix.get::<T>(number)?;
    let before = numbers.to_vec();
    for (row, from) in numbers.chunks_mut(columns).zip(before.chunks(columns).rev()) {
        row.iter_mut().zip(from).for_each(|(to, from)| *to = scale(*from, (1 << exponent) as f32));
    }
    Ok(())
}

fn write(grad: Grad<f32>, values: &[f32]) {
    for (to, value) in grad.data.iter_mut().zip(values) {
        *to = if grad.accumulate { *to + value } else { *value };
    }
}

fn upper_halves(values: &[f32]) -> Vec<Bf16> {
    values.iter().map(|value| Bf16((value.to_bits() >> 16) as u16)).collect()
}

/// Of numbers that are exact in fp16, and normal or zero.
fn halves(values: &[f32]) -> Vec<F16> {
    let half = |bits: u32| match bits & 0x7fff_ffff {
        0 => bits >> 16,
        magnitude => (bits >> 16 & 0x8000) | ((magnitude >> 13) - (112 << 10)),
    };
    values.iter().map(|value| F16(half(value.to_bits()) as u16)).collect()
}

fn hex_of(value: f64) -> String {
    format!("{:016x}", value.to_bits())
}

fn add_view(crc: u32, weights: &Weights<'_>, index: usize) -> Result<u32> {
    Ok(match weights.tensor(index)?.dtype() {
        Dtype::Float32 => crc32(crc, as_bytes(weights.get::<f32>(index)?)),
        Dtype::Bfloat16 => crc32(crc, as_bytes(weights.get::<Bf16>(index)?)),
        _ => crc32(crc, as_bytes(weights.get::<F16>(index)?)),
    })
}
