// SPDX-License-Identifier: Apache-2.0
//! One rank of one scenario: its handles by name, what declares, loads, reads and saves. training.rs has the steps.
use crate::line::Line;
use fsdp::{
    sys, BackwardWeights, Bf16, BytesOwner, Checkpoint, Context, Dtype, Element, Error, GradOp, Group, GroupOptions,
    LoadOptions, MainStorage, Mesh, MeshOptions, MissingGrad, Model, ModelOptions, Optimizer, OuterStrategy, Param,
    Phase, Quantization, Result, SaveOptions, Schedule, ScheduleKind, Status, Strategy, ValueOp, F16,
};
use std::collections::HashMap;

/// A group, and what its param lines say.
pub struct NamedGroup {
    pub model: String,
    pub group: Option<Group>,
    pub params: Vec<Declared>,
}

#[derive(Clone)]
pub struct Declared {
    name: String,
    shape: Vec<u64>,
    dtype: Option<Dtype>,
    flags: u32,
    lr_scale: f64,
    quantization: Option<Quantization>,
    missing_grad: Option<MissingGrad>,
    row_dimensions: u32,
    has_matrices: bool,
    splits: Option<Vec<u64>>,
    pub piece: u32,
    optimizer: Option<Optimizer>,
}

impl Declared {
    pub fn element_count(&self) -> usize {
        self.shape.iter().product::<u64>() as usize
    }
    pub fn is_frozen(&self) -> bool {
        self.flags & sys::FSDP_PARAM_FROZEN != 0
    }
    fn param(&self) -> Param {
        let mut param = Param::new(&self.name, &self.shape)
            .lr_scale(self.lr_scale)
            .row_dimensions(self.row_dimensions)
            .piece(self.piece);
        if let Some(quantization) = self.quantization {
            param = param.quantization(quantization);
        }
        if let Some(missing_grad) = self.missing_grad {
            param = param.missing_grad(missing_grad);
        }
        if let Some(optimizer) = self.optimizer {
            param = param.optimizer(optimizer);
        }
        if self.has_matrices {
            param = param.matrix();
        }
        if let Some(splits) = &self.splits {
            param = param.matrix_splits(splits);
        }
        if let Some(dtype) = self.dtype {
            param = param.dtype(dtype);
        }
        if self.is_frozen() {
            param = param.frozen();
        }
        if self.flags & sys::FSDP_PARAM_NO_DECAY != 0 {
            param = param.no_decay();
        }
        param
    }
}

pub struct Rank {
    pub rank: u32,
    pub world_size: u32,
    context: Option<Context>,
    save_folder: String,
    load_folder: String,
    meshes: HashMap<String, Mesh>,
    pub models: HashMap<String, Model>,
    destroyed: HashMap<String, *mut sys::fsdp_model>, // handles that name nothing any more
    pub groups: Vec<(String, NamedGroup)>,
    checkpoints: HashMap<String, Checkpoint>,
    declared: Vec<Declared>,
    visits: Vec<(Group, Phase, Option<u32>)>,
}

impl Rank {
    pub fn new(context: Context, save_folder: &str, load_folder: &str) -> Self {
        let (rank, world_size) = (context.rank(), context.world_size());
        Rank {
            rank,
            world_size,
            context: Some(context),
            save_folder: format!("{save_folder}/{world_size}"),
            load_folder: load_folder.to_string(),
            meshes: HashMap::new(),
            models: HashMap::new(),
            destroyed: HashMap::new(),
            groups: Vec::new(),
            checkpoints: HashMap::new(),
            declared: Vec::new(),
            visits: Vec::new(),
        }
    }

    pub fn abort(&self, reason: &str) {
        let _ = self.context.as_ref().map(|context| context.abort(reason));
    }

    /// Makes the call, and returns what it gives: "-" for nothing. A param line is no call.
    pub fn execute(&mut self, line: &Line) -> Result<String> {
        let found = self.declare(line).or_else(|| self.move_values(line)).or_else(|| self.use_checkpoint(line));
        found.or_else(|| self.train(line)).unwrap_or_else(|| panic!("unknown call: {}", line.text))
    }

    // ---- what calls need ----------------------------------------------------------------------------------------

    pub fn context(&self) -> &Context {
        self.context.as_ref().expect("a context that was not closed")
    }
    pub fn model(&mut self, name: &str) -> Result<&mut Model> {
        if let Some(raw) = self.destroyed.get(name) {
            // What the library itself says of the handle.
            status(unsafe { sys::fsdp_publish_weights(*raw, std::ptr::null_mut()) })?;
        }
        Ok(self.models.get_mut(name).expect("a model of that name"))
    }
    pub fn named(&self, name: &str) -> &NamedGroup {
        &self.groups.iter().find(|(known, _)| known == name).expect("a group of that name").1
    }
    /// The model and the group of the line, whose first word behind the call names the group.
    pub fn of_group(&mut self, line: &Line) -> Result<(&mut Model, Group)> {
        let named = self.named(line.word(1));
        let (model, group) = (named.model.clone(), named.group.expect("a group that was created"));
        Ok((self.model(&model)?, group))
    }
    pub fn element_count(&self, line: &Line) -> usize {
        self.named(line.word(1)).params.get(line.integer(2) as usize).map_or(1, Declared::element_count)
    }
    pub fn value_at(&self, line: &Line, first: usize, shift: i64, i: i64) -> f64 {
        let [a, b, c, m, k] = [0, 1, 2, 3, 4].map(|word| line.integer(first + word));
        ((a * i + b + shift + c * i64::from(self.rank)) % m - m / 2) as f64 / (1i64 << k) as f64
    }
    pub fn array(&self, line: &Line, first: usize, shift: i64, count: usize) -> Vec<f32> {
        (0..count as i64).map(|i| self.value_at(line, first, shift, i) as f32).collect()
    }

    // ---- declaring ----------------------------------------------------------------------------------------------

    fn declare(&mut self, line: &Line) -> Option<Result<String>> {
        Some(nothing(match line.word(0) {
            "param" => {
                let shape = (2..line.words.len()).map(|word| line.integer(word) as u64).collect();
                self.declared.push(Declared {
                    name: line.word(1).to_string(),
                    shape,
                    dtype: line.key_integer("dtype").and_then(|raw| Dtype::from_raw(raw as i32)),
                    flags: line.key_integer("flags").unwrap_or(0) as u32,
                    lr_scale: line.key_number("lr_scale").unwrap_or(0.0),
                    quantization: line.key_integer("quantization").and_then(|raw| Quantization::from_raw(raw as i32)),
                    missing_grad: line.key_integer("missing_grad").and_then(|raw| MissingGrad::from_raw(raw as i32)),
                    row_dimensions: line.key_integer("row_dimensions").unwrap_or(0) as u32,
                    has_matrices: line.key("matrix").is_some(),
                    splits: line.key("splits").map(|rows| rows.split(',').map(|n| n.parse().expect("rows")).collect()),
                    piece: line.key_integer("piece").unwrap_or(0) as u32,
                    optimizer: line.key_integer("optimizer").and_then(|raw| Optimizer::from_raw(raw as i32)),
                });
                Ok(())
            }
            "visit" => {
                let group = self.named(line.word(1)).group.expect("a group that was created");
                let phase = Phase::from_raw(line.integer(2) as i32).expect("a phase");
                self.visits.push((group, phase, piece(line)));
                Ok(())
            }
            "create_mesh" => self.create_mesh(line),
            "create_model" => self.create_model(line),
            "create_group" => self.create_group(line),
            "set_schedule" => self.set_schedule(line),
            "find_group" => self.model(line.word(1)).and_then(|model| model.group(line.word(2))).map(drop),
            "destroy_model" => {
                let model = self.models.remove(line.word(1)).expect("a model of that name");
                self.destroyed.insert(line.word(1).to_string(), model.as_raw());
                Ok(())
            }
            "destroy_mesh" => {
                self.meshes.remove(line.word(1));
                Ok(())
            }
            "close_context" => self.context.take().expect("a context").close(),
            "abort_context" => self.context().abort("conformance"),
            _ => return None,
        }))
    }

    fn create_mesh(&mut self, line: &Line) -> Result<()> {
        let size = |key| line.key_integer(key).unwrap_or(0) as u32;
        let mut options = MeshOptions::new().replicate_size(size("replicate_size")).shard_size(size("shard_size"));
        let ranks: Vec<u32> = (2..line.words.len()).map(|i| line.integer(i) as u32).collect();
        if !ranks.is_empty() {
            options = options.ranks(&ranks);
        }
        let mesh = Mesh::new(self.context(), &options)?;
        self.meshes.insert(line.word(1).to_string(), mesh);
        Ok(())
    }

    fn create_model(&mut self, line: &Line) -> Result<()> {
        let mut options = ModelOptions::new();
        if let Some(mesh) = line.key("mesh") {
            options = options.mesh(&self.meshes[mesh]);
        }
        // A value that the enum does not have, and flags that have no method, only the header's struct can say.
        let mut beyond = line.key_integer("flags").unwrap_or(0) as u32 & !sys::FSDP_MODEL_NO_PREFETCH != 0;
        if line.key_integer("flags").unwrap_or(0) as u32 & sys::FSDP_MODEL_NO_PREFETCH != 0 {
            options = options.no_prefetch();
        }
        macro_rules! set {
            ($($field:ident: $kind:ident),*) => {$(
                if let Some(raw) = line.key_integer(stringify!($field)) {
                    match fsdp::$kind::from_raw(raw as i32) {
                        Some(value) => options = options.$field(value),
                        None => beyond = true,
                    }
                }
            )*};
        }
        set!(strategy: Strategy, outer_strategy: OuterStrategy, unshard_mode: UnshardMode, view_kind: ViewKind, grad_dtype: Dtype,
             reduce_dtype: Dtype, grad_op: GradOp, reduce_policy: ReducePolicy, optimizer: Optimizer, main_storage: MainStorage);
        options = options.grad_factor(line.key_number("grad_factor").unwrap_or(0.0));
        options = options.max_pending_groups(line.key_integer("max_pending_groups").unwrap_or(0) as u32);
        options = options.max_pending_bytes(line.key_integer("max_pending_bytes").unwrap_or(0) as u64);
        options = options.prefetch_depth(line.key_integer("prefetch_depth").unwrap_or(0) as u32);
        options = options.matrix_bytes(line.key_integer("matrix_bytes").unwrap_or(0) as u64);
        options = options.rounding_seed(line.key_integer("rounding_seed").unwrap_or(0) as u64);
        if beyond {
            return self.create_raw_model(line);
        }
        let model = Model::new(self.context(), &options)?;
        self.destroyed.remove(line.word(1));
        self.models.insert(line.word(1).to_string(), model);
        Ok(())
    }

    fn create_raw_model(&self, line: &Line) -> Result<()> {
        let options = sys::fsdp_model_options {
            flags: line.key_integer("flags").unwrap_or(0) as u32,
            strategy: line.key_integer("strategy").unwrap_or(0) as i32,
            main_storage: line.key_integer("main_storage").unwrap_or(0) as i32,
            ..Default::default()
        };
        let mut made = std::ptr::null_mut();
        status(unsafe { sys::fsdp_create_model(self.context().as_raw(), &options, &mut made) })
    }

    fn set_schedule(&mut self, line: &Line) -> Result<()> {
        let held_groups = line.key_integer("held_groups").unwrap_or(0) as u32;
        let visits = std::mem::take(&mut self.visits);
        let model = self.model(line.word(1))?;
        match ScheduleKind::from_raw(line.integer(2) as i32) {
            Some(ScheduleKind::Any) => model.set_schedule(Schedule::Any { held_groups }),
            Some(ScheduleKind::Sequential) if held_groups == 0 => model.set_schedule(Schedule::Sequential),
            Some(ScheduleKind::Visits) if held_groups == 0 => model.set_schedule(Schedule::PieceVisits(&visits)),
            Some(ScheduleKind::Interleaved) if held_groups == 0 => model.set_schedule(Schedule::Interleaved),
            _ => {
                let options = sys::fsdp_schedule_options { held_groups, ..Default::default() };
                status(unsafe { sys::fsdp_set_schedule(model.as_raw(), line.integer(2) as i32, &options) })
            }
        }
    }

    fn create_group(&mut self, line: &Line) -> Result<()> {
        let declared = std::mem::take(&mut self.declared);
        let params: Vec<Param> = declared.iter().map(Declared::param).collect();
        let flags = line.key_integer("flags").unwrap_or(0) as u32;
        let mut options = GroupOptions::new();
        if flags & sys::FSDP_GROUP_ROOT != 0 {
            options = options.root();
        }
        let storage = line.key_integer("main_storage");
        match storage.map(|raw| MainStorage::from_raw(raw as i32)) {
            Some(None) => return self.create_raw_group(line),
            Some(Some(storage)) => options = options.main_storage(storage),
            None => (),
        }
        let reads = line.key_integer("backward_weights").and_then(|raw| BackwardWeights::from_raw(raw as i32));
        if let Some(reads) = reads {
            options = options.backward_weights(reads);
        }
        if let Some(mesh) = line.key("mesh") {
            options = options.mesh(&self.meshes[mesh]);
        }
        if let Some(op) = line.key_integer("grad_op").and_then(|raw| GradOp::from_raw(raw as i32)) {
            options = options.grad_op(op);
        }
        if let Some(outer) = line.key_integer("outer_strategy").and_then(|raw| OuterStrategy::from_raw(raw as i32)) {
            options = options.outer_strategy(outer);
        }
        if let Some(factor) = line.key_number("grad_factor") {
            options = options.grad_factor(factor);
        }
        if let Some(strategy) = line.key_integer("strategy").and_then(|raw| Strategy::from_raw(raw as i32)) {
            options = options.strategy(strategy);
        }
        let created = self.model(line.word(1))?.create_group(line.word(2), &params, &options);
        let is_known = self.groups.iter().any(|(name, _)| name == line.word(2));
        if created.is_ok() || !is_known {
            self.groups.retain(|(name, _)| name != line.word(2));
            let (model, group) = (line.word(1).to_string(), created.as_ref().ok().copied());
            self.groups.push((line.word(2).to_string(), NamedGroup { model, group, params: declared }));
        }
        created.map(drop)
    }

    /// With a value that the enum does not have.
    fn create_raw_group(&mut self, line: &Line) -> Result<()> {
        let options = sys::fsdp_group_options {
            main_storage: line.key_integer("main_storage").unwrap_or(0) as i32,
            ..Default::default()
        };
        let name = std::ffi::CString::new(line.word(2)).expect("a name");
        let param = sys::fsdp_param { name: name.as_ptr(), dtype: sys::FSDP_FLOAT32, ..Default::default() };
        let (raw, stride) = (self.model(line.word(1))?.as_raw(), std::mem::size_of_val(&param) as u64);
        let mut made = std::ptr::null_mut();
        status(unsafe { sys::fsdp_create_group(raw, name.as_ptr(), &param, 1, stride, &options, &mut made) })
    }

    // ---- values -------------------------------------------------------------------------------------------------

    fn move_values(&mut self, line: &Line) -> Option<Result<String>> {
        let index = line.integer(2) as usize;
        Some(match line.word(0) {
            "load_param" => nothing(self.load_param(line, index)),
            "read_param" => self.of_group(line).and_then(|(model, group)| match line.key_integer("dtype") {
                Some(2) => Ok(crc_of(&model.read_param::<Bf16>(group, index)?)),
                Some(3) => Ok(crc_of(&model.read_param::<F16>(group, index)?)),
                _ => Ok(crc_of(&model.read_param::<f32>(group, index)?)),
            }),
            "load_state" => {
                let values = self.array(line, 4, 0, self.element_count(line));
                nothing(
                    self.of_group(line)
                        .and_then(|(model, group)| model.window()?.load_state(group, index, line.word(3), &values)),
                )
            }
            "read_state" => self
                .of_group(line)
                .and_then(|(model, group)| Ok(crc_of(&model.read_state::<f32>(group, index, line.word(3))?))),
            "load_grad" => nothing(self.load_grad(line, index)),
            "read_grad" => self.of_group(line).and_then(|(model, group)| match line.key_integer("dtype") {
                Some(2) => Ok(crc_of(&model.window()?.read_grad::<Bf16>(group, index)?)),
                _ => Ok(crc_of(&model.window()?.read_grad::<f32>(group, index)?)),
            }),
            "set_param_lr_scale" => nothing(
                self.of_group(line).and_then(|(model, group)| model.set_param_lr_scale(group, index, line.number(3))),
            ),
            "set_param_trainable" => nothing(
                self.of_group(line)
                    .and_then(|(model, group)| model.set_param_trainable(group, index, line.integer(3) != 0)),
            ),
            _ => return None,
        })
    }

    fn load_grad(&mut self, line: &Line, index: usize) -> Result<()> {
        let values = self.array(line, 3, 0, self.element_count(line));
        let (model, group) = self.of_group(line)?;
        let mut window = model.window()?;
        match line.key_integer("root") {
            Some(root) => window.load_grad_from(root as u32, group, index, Some(&values)),
            None => window.load_grad(group, index, &values),
        }
    }

    /// Where types allow no such call, through the header's.
    fn load_param(&mut self, line: &Line, index: usize) -> Result<()> {
        let values = self.array(line, 3, 0, self.element_count(line));
        let (model, group) = self.of_group(line)?;
        let root = line.key_integer("root");
        let raw_keys = ["dtype", "element_count", "flags"].iter().any(|key| line.key(key).is_some());
        if raw_keys || root.map_or(false, |root| root < 0) {
            let raw = model.group_as_raw(group)?;
            let key = |name, otherwise| line.key_integer(name).unwrap_or(otherwise);
            let (dtype, root) = (key("dtype", 1) as i32, key("root", i64::from(sys::FSDP_EVERY_RANK)) as i32);
            let count = key("element_count", values.len() as i64) as u64;
            let (data, flags) = (values.as_ptr().cast(), key("flags", 0) as u32);
            return status(unsafe { sys::fsdp_load_param(raw, index as u64, data, dtype, count, root, flags) });
        }
        let mut window = model.window()?;
        match root {
            Some(root) => window.load_param_from(root as u32, group, index, Some(&values)),
            None => window.load_param(group, index, &values),
        }
    }

    // ---- checkpoints and the world ------------------------------------------------------------------------------

    fn use_checkpoint(&mut self, line: &Line) -> Option<Result<String>> {
        let (name, second, third) = (line.word(1), line.word(2), line.word(3));
        let save_path = format!("{}/{second}", self.save_folder);
        let load_path = format!("{}/{second}/{third}", self.load_folder);
        Some(match line.word(0) {
            "save" => nothing(self.model(name).and_then(|model| model.save(save_path, &SaveOptions::new()))),
            "load" => {
                let only = line.key_integer("flags").unwrap_or(0) as u32 & sys::FSDP_LOAD_WEIGHTS_ONLY != 0;
                let options = if only { LoadOptions::new().weights_only() } else { LoadOptions::new() };
                self.model(name).and_then(|model| {
                    let loaded = model.window()?.load(load_path, &options)?;
                    Ok(format!("{}/{}", loaded.step, loaded.loaded_tensors))
                })
            }
            "begin_checkpoint" => nothing(
                Checkpoint::begin(self.context(), save_path, &SaveOptions::new()).map(|made| self.keep(name, made)),
            ),
            "open_checkpoint" => nothing(Checkpoint::open(self.context(), load_path).map(|made| self.keep(name, made))),
            "destroy_checkpoint" => {
                self.checkpoints.remove(name);
                nothing(Ok(()))
            }
            "all_reduce_values" => self.all_reduce_values(line),
            call if call.contains("checkpoint") => self.with_checkpoint(line),
            _ => return None,
        })
    }

    fn keep(&mut self, name: &str, made: Checkpoint) {
        self.checkpoints.insert(name.to_string(), made);
    }

    fn with_checkpoint(&mut self, line: &Line) -> Result<String> {
        let bytes = match line.word(0) {
            "add_checkpoint_bytes" => as_bytes(&self.array(line, 5, 0, line.integer(4) as usize)).to_vec(),
            _ => Vec::new(),
        };
        let checkpoint = self.checkpoints.get_mut(line.word(1)).expect("a checkpoint of that name");
        let (name, models) = (line.word(2), &mut self.models);
        match line.word(0) {
            "add_checkpoint_model" => nothing(checkpoint.add_model(name, &models[line.word(3)])),
            "load_checkpoint_model" => {
                let mut window = models.get_mut(line.word(3)).expect("a model of that name").window()?;
                Ok(checkpoint.load_model(name, &mut window, &LoadOptions::new())?.step.to_string())
            }
            "add_checkpoint_bytes" => {
                let owner = BytesOwner::from_raw(line.integer(3) as i32).expect("an owner");
                nothing(checkpoint.add_bytes(name, &bytes, owner))
            }
            "read_checkpoint_bytes" => Ok(format!("{:08x}", crc32(0, &checkpoint.read_bytes(name)?))),
            "commit_checkpoint" => nothing(checkpoint.commit()),
            "wait_checkpoint" => nothing(checkpoint.wait()),
            call => panic!("unknown call: {call}"),
        }
    }

    fn all_reduce_values(&mut self, line: &Line) -> Result<String> {
        let mut values: Vec<f64> = (0..line.integer(2)).map(|i| self.value_at(line, 3, 0, i)).collect();
        let op = ValueOp::from_raw(line.integer(1) as i32).expect("an op");
        self.context().all_reduce_values(&mut values, op)?;
        Ok(crc_of_doubles(&values))
    }
}

/// The CRC-32 of doubles.
pub fn crc_of_doubles(values: &[f64]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    format!("{:08x}", crc32(0, &bytes))
}

/// A status of the header's as the crate tells it.
pub fn status(raw: sys::fsdp_status) -> Result<()> {
    if raw == sys::FSDP_OK {
        return Ok(());
    }
    let mut detail = sys::fsdp_error::default();
    assert_eq!(unsafe { sys::fsdp_get_last_error(std::ptr::null(), &mut detail) }, sys::FSDP_OK);
    Err(Error {
        status: Status::from_raw(raw).expect("a status"),
        origin: fsdp::Origin::from_raw(detail.origin).expect("an origin"),
        origin_code: detail.origin_code,
        rank: u32::try_from(detail.rank).ok(),
        context_failed: detail.context_failed != 0,
        message: fsdp::get_last_message(),
    })
}

pub fn nothing(result: Result<()>) -> Result<String> {
    result.map(|()| "-".to_string())
}

pub fn as_bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: plain numbers.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), std::mem::size_of_val(values)) }
}

pub fn crc_of<T: Element>(values: &[T]) -> String {
    format!("{:08x}", crc32(0, as_bytes(values)))
}

/// The CRC-32 of IEEE 802.3, going on from that of what came before.
pub fn crc32(before: u32, bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!before, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ if crc & 1 != 0 { 0xEDB8_8320 } else { 0 })
    })
}

/// Which piece of its group the line names.
pub fn piece(line: &Line) -> Option<u32> {
    line.key_integer("piece").map(|number| number as u32)
}
