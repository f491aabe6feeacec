// SPDX-License-Identifier: Apache-2.0
//! What a visit of a group costs over the safe crate; bindings/benchmark/visit.c says what it is.
//!
//!     visit index    views by their numbers
//!     visit name     views by their names
use fsdp::{Context, Group, Model, ModelOptions, Param, Phase};
use std::time::Instant;

const VIEWS: usize = 12;
const VISITS: u32 = 20_000;
const ROUNDS: usize = 9;

fn time_visits(model: &Model, group: Group, names: &[String], by_name: bool, sum: &mut f32) -> fsdp::Result<f64> {
    let began = Instant::now();
    for _ in 0..VISITS {
        let weights = model.unshard(group, Phase::Forward)?;
        for (index, name) in names.iter().enumerate() {
            *sum += if by_name { weights.get::<f32>(name.as_str())?[0] } else { weights.get::<f32>(index)?[0] };
        }
    }
    Ok(began.elapsed().as_nanos() as f64 / f64::from(VISITS))
}

fn main() -> fsdp::Result<()> {
    let by_name = std::env::args().nth(1).as_deref() == Some("name");
    let context = Context::local(1, &Default::default())?.remove(0);
    let mut model = Model::new(&context, &ModelOptions::new())?;
    let names: Vec<String> = (0..VIEWS).map(|index| format!("w{index}")).collect();
    let params: Vec<Param> = names.iter().map(|name| Param::new(name, &[64, 64])).collect();
    let group = model.create_group("layer", &params, &Default::default())?;
    model.seal()?.publish()?;
    let mut sum = 0.0;
    let mut times = Vec::new();
    for _ in 0..=ROUNDS {
        times.push(time_visits(&model, group, &names, by_name, &mut sum)?);
    }
    times.remove(0); // the first one warms up
    times.sort_by(f64::total_cmp);
    println!("{:.1}", times[ROUNDS / 2]);
    assert_eq!(sum, 0.0); // the weights were never loaded
    Ok(())
}
