// SPDX-License-Identifier: Apache-2.0
//! Finds libfsdp, and builds nothing: FSDP_LIB_DIR names the folder with libfsdp.so, else the command pkg-config knows it.
use std::env;
use std::process::{exit, Command};

const HELP: &str =
    "libfsdp was not found. Install it (its README says how) so that `pkg-config --libs fsdp` knows it, \
                    or set FSDP_LIB_DIR to the folder that has libfsdp.so.";

fn main() {
    println!("cargo:rerun-if-env-changed=FSDP_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("DOCS_RS").is_some() {
        return; // documents link nothing
    }
    match env::var("FSDP_LIB_DIR") {
        Ok(folder) => {
            println!("cargo:rustc-link-search=native={folder}");
            println!("cargo:rustc-link-lib=dylib=fsdp");
            println!("cargo:lib_dir={folder}"); // DEP_FSDP_LIB_DIR of crates that depend on this one
        }
        Err(_) => ask_pkg_config(),
    }
}

fn ask_pkg_config() {
    let command = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".to_string());
    let asked = Command::new(&command).args(["--libs", "fsdp >= 0.2"]).output();
    let output = asked.unwrap_or_else(|error| give_up(&format!("{command}: {error}")));
    if !output.status.success() {
        give_up(&format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    for word in String::from_utf8_lossy(&output.stdout).split_whitespace() {
        if let Some(folder) = word.strip_prefix("-L") {
            println!("cargo:rustc-link-search=native={folder}");
        } else if let Some(library) = word.strip_prefix("-l") {
            println!("cargo:rustc-link-lib=dylib={library}");
        }
    }
}

fn give_up(why: &str) -> ! {
    eprintln!("{HELP} ({why})");
    exit(1)
}
