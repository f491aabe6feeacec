// SPDX-License-Identifier: Apache-2.0
use fsdp::{AdamwOptions, Context, ContextOptions, Model, ModelOptions, Param, Phase};

fn main() -> fsdp::Result<()> {
    let context = Context::new(&ContextOptions::new())?; // rank and world size from fsdp-run
    let mut model = Model::new(&context, &ModelOptions::new())?;
    let layer = model.create_group("layer", &[Param::new("weight", &[4, 8])], &Default::default())?;
    let mut window = model.seal()?; // plans and allocates everything, compares all ranks
    window.load_param(layer, "weight", &[0f32; 32])?;
    window.publish()?;

    for _ in 0..100 {
        let mut grads = model.grads(layer)?;
        let weights = model.unshard(layer, Phase::Backward)?;
        let w: &[f32] = weights.get("weight")?;
        let grad = grads.get("weight")?;
        for (g, w) in grad.data.iter_mut().zip(w) {
            *g = w - 1.0; // the loss is sum (w - 1)^2 / 2
        }
        weights.reshard()?; // w is gone: using it from here on does not compile
        grads.reduce_last()?; // and so is grad
        model.finish_grads(1.0)?.step_adamw(0.1, &AdamwOptions::new())?;
    }

    let result: Vec<f32> = model.read_param(layer, "weight")?;
    println!("w[0] = {:.2}", result[0]); // close to 1
    assert!((result[0] - 1.0).abs() < 0.05);
    context.close()
}
