// SPDX-License-Identifier: Apache-2.0
fn train(model: &fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
    let mut grads = model.grads(layer)?;
    let grad = grads.get::<f32>("weight")?;
    grad.data.fill(1.0);
    grads.reduce_last()?; //~ E0505
    grad.data.fill(2.0); // misuse
    Ok(())
}

fn main() {
    let _ = train;
}
