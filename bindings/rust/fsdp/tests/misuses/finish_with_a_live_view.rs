// SPDX-License-Identifier: Apache-2.0
fn train(model: &mut fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
    let weights = model.unshard(layer, fsdp::Phase::Forward)?;
    println!("{}", weights.get::<f32>("weight")?[0]);
    weights.tensor(0)?;
    let w: &[f32] = weights.get("weight")?;
    let _ = w;
    model.finish_grads(1.0)?.publish()?; //~ E0502 // misuse
    weights.reshard()
}

fn main() {
    let _ = train;
}
