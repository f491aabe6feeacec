// SPDX-License-Identifier: Apache-2.0
fn train(model: fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
    let weights = model.unshard(layer, fsdp::Phase::Forward)?;
    let w: &[f32] = weights.get("weight")?;
    drop(model); //~ E0505 // misuse
    println!("{}", w[0]);
    Ok(())
}

fn main() {
    let _ = train;
}
