// SPDX-License-Identifier: Apache-2.0
//! The README's program is examples/train.rs, which is built here and run on two ranks by bindings/rust/test.sh.
#[test]
fn the_readme_has_the_example() {
    let (readme, example) = (include_str!("../README.md"), include_str!("../examples/train.rs"));
    let program = example.split_once('\n').unwrap().1; // without the license line
    assert!(readme.contains(program));
    assert!(program.lines().filter(|line| !line.is_empty()).count() <= 30);
}
