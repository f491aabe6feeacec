// SPDX-License-Identifier: Apache-2.0
fn train(model: &fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
    let weights = model.unshard(layer, fsdp::Phase::Forward)?;
    let w: &[f32] = weights.get("weight")?;
    println!("{}", w[0]);
    weights.reshard()?; //~ E0505
    println!("{}", w[0]); // misuse
    Ok(())
}

fn main() {
    let _ = train;
}
