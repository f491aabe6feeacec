// SPDX-License-Identifier: Apache-2.0
//! The programs of tests/misuses do not compile, with the error and at the line that they are marked with; without the line
//! that is marked "misuse" they do. (rustdoc's compile_fail looks at no error's number on a stable compiler.)
use std::path::{Path, PathBuf};
use std::process::Command;

/// A package with the programs, each as it is or mended.
fn make_package(name: &str, mend: bool) -> (PathBuf, Vec<(String, String)>) {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(root.join("src/bin")).unwrap();
    let crate_path = env!("CARGO_MANIFEST_DIR");
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2021\"\n[workspace]\n[dependencies]\nfsdp = {{ path = \"{crate_path}\" }}\n"
    );
    std::fs::write(root.join("Cargo.toml"), manifest).unwrap();
    let mut programs = Vec::new();
    for entry in std::fs::read_dir(Path::new(crate_path).join("tests/misuses")).unwrap() {
        let path = entry.unwrap().path();
        let (stem, text) =
            (path.file_stem().unwrap().to_str().unwrap().to_string(), std::fs::read_to_string(&path).unwrap());
        let kept: Vec<&str> = text.lines().filter(|line| !(mend && line.contains("// misuse"))).collect();
        std::fs::write(root.join("src/bin").join(format!("{stem}.rs")), kept.join("\n") + "\n").unwrap();
        programs.push((stem, text));
    }
    (root, programs)
}

/// Whether the program compiles, and what the compiler says, a line each: "src/bin/x.rs:12:5: error[E0505]: ...".
fn compile(root: &Path, program: &str) -> (bool, String) {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["check", "--offline", "--message-format=short", "--color=never", "--bin", program]);
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("misuses-target");
    let output = cargo.current_dir(root).env("CARGO_TARGET_DIR", target).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn misuses_do_not_compile() {
    let (root, programs) = make_package("misuses", false);
    assert_eq!(programs.len(), 9);
    for (stem, text) in programs {
        let (compiled, errors) = compile(&root, &stem);
        assert!(!compiled, "{stem}");
        let marked = text.lines().position(|line| line.contains("//~ ")).expect("a mark");
        let code =
            text.lines().nth(marked).unwrap().split("//~ ").nth(1).unwrap().split(' ').next().unwrap().to_string();
        let place = format!("src/bin/{stem}.rs:");
        let found: Vec<&str> =
            errors.lines().filter(|line| line.starts_with(&place) && line.contains("error[")).collect();
        assert_eq!(found.len(), 1, "{stem}: {errors}");
        let line = format!("{place}{}:", marked + 1);
        assert!(found[0].starts_with(&line) && found[0].contains(&format!("error[{code}]")), "{stem}: {}", found[0]);
    }
}

#[test]
fn mended_they_compile() {
    let (root, programs) = make_package("mended", true);
    for (stem, _) in programs {
        let (compiled, errors) = compile(&root, &stem);
        assert!(compiled, "{stem}: {errors}");
    }
}
