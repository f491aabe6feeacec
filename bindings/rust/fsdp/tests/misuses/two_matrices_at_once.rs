// SPDX-License-Identifier: Apache-2.0
fn orthogonalize(window: &mut fsdp::Window<'_>) -> fsdp::Result<()> {
    let mut matrices = window.collect_matrices(&Default::default())?;
    let one = matrices.next()?;
    let two = matrices.next()?; //~ E0499 // misuse
    drop(one);
    drop(two); // misuse
    matrices.give_back()
}

fn main() {
    let _ = orthogonalize;
}
