// SPDX-License-Identifier: Apache-2.0
fn orthogonalize(window: &mut fsdp::Window<'_>) -> fsdp::Result<()> {
    let mut matrices = window.collect_matrices(&Default::default())?;
    let mut one = matrices.next()?.expect("a matrix");
    one.get::<f32>(0)?[0] = 1.0;
    matrices.give_back()?; //~ E0505
    one.get::<f32>(0)?[0] = 2.0; // misuse
    Ok(())
}

fn main() {
    let _ = orthogonalize;
}
