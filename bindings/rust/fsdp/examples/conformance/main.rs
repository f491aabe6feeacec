// SPDX-License-Identifier: Apache-2.0
//! The interpreter of the conformance scenarios over the safe crate; bindings/conformance/README.md says what it does.
//!
//!     conformance threads SAVE_FOLDER LOAD_FOLDER scenarios.txt
//!     fsdp-run -n 2 --no-prefix conformance processes SAVE_FOLDER LOAD_FOLDER scenarios.txt
mod line;
mod rank;
mod training;

use fsdp::{Context, ContextOptions};
use line::{Line, Scenario};
use rank::{crc32, Rank};
use std::sync::atomic::{AtomicBool, Ordering};

static ALL_AS_EXPECTED: AtomicBool = AtomicBool::new(true);

/// What a call came to.
struct Outcome {
    status: i32,
    rank: i32,
    value: String,
    message: String,
}

fn execute(rank: &mut Rank, line: &Line) -> Outcome {
    match rank.execute(line) {
        Ok(value) => Outcome { status: 0, rank: -1, value, message: String::new() },
        Err(error) => Outcome {
            status: error.status as i32,
            rank: error.rank.map_or(-1, |rank| rank as i32),
            value: "-".to_string(),
            message: error.message,
        },
    }
}

fn has_expected_status(line: &Line, outcome: &Outcome) -> bool {
    outcome.status == if line.fails { line.expected[0].parse().expect("a status") } else { 0 }
}

fn is_expected(line: &Line, outcome: &Outcome, world: usize) -> bool {
    if !has_expected_status(line, outcome) {
        return false;
    }
    if line.fails {
        return outcome.rank.to_string() == line.expected[1];
    }
    let index = if line.expected.len() == 1 { 0 } else { world };
    !line.gives || outcome.value == line.expected[index]
}

fn tell(scenario: &Scenario, rank: &Rank, line: &Line, outcome: &Outcome) {
    eprintln!("{}, world {}, rank {}: {}", scenario.name, rank.world_size, rank.rank, line.text);
    eprintln!("  gave status {} {}, rank {}: {}", outcome.status, outcome.value, outcome.rank, outcome.message);
}

fn run_rank(context: Context, scenario: &Scenario, world: usize, arguments: &[String]) {
    let mut rank = Rank::new(context, &arguments[2], &arguments[3]);
    let (here, mut transcript, mut number) = (rank.rank, 0, 0);
    for line in scenario.lines.iter().filter(|line| line.is_for(here)) {
        let outcome = execute(&mut rank, line);
        if matches!(line.word(0), "param" | "visit") {
            continue;
        }
        number += 1;
        let noted = format!("{number} {} {} {}\n", outcome.status, outcome.rank, outcome.value);
        transcript = crc32(transcript, noted.as_bytes());
        if !is_expected(line, &outcome, world) {
            tell(scenario, &rank, line, &outcome);
            ALL_AS_EXPECTED.store(false, Ordering::Relaxed);
            if !has_expected_status(line, &outcome) {
                rank.abort("a status that was not expected");
                break;
            }
        }
    }
    println!("{} {} {} {transcript:08x}", scenario.name, rank.world_size, rank.rank);
}

fn run_threads(scenario: &Scenario, world: usize, options: &ContextOptions, arguments: &[String]) {
    let contexts = Context::local(scenario.worlds[world], options).expect("contexts");
    std::thread::scope(|scope| {
        for context in contexts {
            scope.spawn(move || run_rank(context, scenario, world, arguments));
        }
    });
}

fn run_process(scenario: &Scenario, options: &ContextOptions, arguments: &[String]) {
    let world_size = std::env::var("WORLD_SIZE").map_or(1, |size| size.parse().expect("a number of ranks"));
    if let Some(world) = scenario.worlds.iter().position(|size| *size == world_size) {
        run_rank(Context::new(options).expect("a context"), scenario, world, arguments);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let how = arguments.get(1).map_or("", String::as_str);
    if arguments.len() != 5 || !matches!(how, "threads" | "processes") {
        eprintln!("usage: conformance threads|processes SAVE_FOLDER LOAD_FOLDER scenarios.txt");
        std::process::exit(2);
    }
    let options = ContextOptions::new().timeout_ms(30_000);
    for scenario in line::read_scenarios(&arguments[4]) {
        if how == "processes" {
            run_process(&scenario, &options, &arguments);
            continue;
        }
        (0..scenario.worlds.len()).for_each(|world| run_threads(&scenario, world, &options, &arguments));
    }
    std::process::exit(i32::from(!ALL_AS_EXPECTED.load(Ordering::Relaxed)));
}
