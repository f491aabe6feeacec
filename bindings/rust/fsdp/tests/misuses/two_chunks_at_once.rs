// SPDX-License-Identifier: Apache-2.0
fn update(window: &mut fsdp::Window<'_>) -> fsdp::Result<()> {
    let mut chunks = window.shard_chunks()?;
    let one = chunks.next()?;
    let two = chunks.next()?; //~ E0499 // misuse
    drop(one);
    drop(two); // misuse
    Ok(())
}

fn main() {
    let _ = update;
}
