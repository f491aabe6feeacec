// SPDX-License-Identifier: Apache-2.0
fn train(model: &fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
    let mut grads = model.grads(layer)?;
    grads.get::<f32>("weight")?.data.fill(1.0);
    grads.reduce_last()?;
    grads.get::<f32>("weight")?.data.fill(2.0); //~ E0382 // misuse
    Ok(())
}

fn main() {
    let _ = train;
}
