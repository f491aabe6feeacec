// SPDX-License-Identifier: Apache-2.0
fn train(model: &fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
    let mut grads = model.grads(layer)?;
    let one = grads.get::<f32>("weight")?;
    let two = grads.get::<f32>("weight")?; //~ E0499 // misuse
    one.data[0] = 1.0;
    two.data[0] = 2.0; // misuse
    Ok(())
}

fn main() {
    let _ = train;
}
