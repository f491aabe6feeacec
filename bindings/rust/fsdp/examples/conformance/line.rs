// SPDX-License-Identifier: Apache-2.0
//! The lines of scenarios.txt.
use std::collections::HashMap;

/// A line: what it calls, KEY=VALUE apart from the other words, and what stands behind "->" or "!".
#[derive(Default)]
pub struct Line {
    pub text: String,
    pub words: Vec<String>,
    pub expected: Vec<String>,
    keys: HashMap<String, String>,
    only: Option<u32>,
    but: Option<u32>,
    pub gives: bool,
    pub fails: bool,
}

impl Line {
    fn cut(text: &str, defines: &HashMap<String, String>) -> Self {
        let meaning = |word: &str| defines.get(word).cloned().unwrap_or_else(|| word.to_string());
        let mut line = Line { text: text.to_string(), ..Default::default() };
        for word in text.split_whitespace() {
            match word {
                _ if line.gives || line.fails => line.expected.push(meaning(word)),
                "->" => line.gives = true,
                "!" => line.fails = true,
                _ => match word.split_once('=') {
                    Some((key, value)) if !line.words.is_empty() => {
                        line.keys.insert(key.to_string(), meaning(value));
                    }
                    _ => line.words.push(meaning(word)),
                },
            }
        }
        if matches!(line.word(0), "on" | "off") {
            let rank = Some(line.integer(1) as u32);
            *(if line.word(0) == "on" { &mut line.only } else { &mut line.but }) = rank;
            line.words.drain(..2);
        }
        line
    }

    pub fn is_for(&self, rank: u32) -> bool {
        self.only.map_or(true, |only| only == rank) && self.but != Some(rank)
    }
    pub fn word(&self, index: usize) -> &str {
        self.words.get(index).map_or("", String::as_str)
    }
    pub fn integer(&self, index: usize) -> i64 {
        self.word(index).parse().unwrap_or(0)
    }
    pub fn number(&self, index: usize) -> f64 {
        self.word(index).parse().expect("a number")
    }
    pub fn key(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }
    pub fn key_integer(&self, key: &str) -> Option<i64> {
        self.key(key).map(|value| value.parse().expect("an integer"))
    }
    pub fn key_number(&self, key: &str) -> Option<f64> {
        self.key(key).map(|value| value.parse().expect("a number"))
    }
}

pub struct Scenario {
    pub name: String,
    pub worlds: Vec<u32>,
    pub lines: Vec<Line>,
}

pub fn read_scenarios(path: &str) -> Vec<Scenario> {
    let (mut defines, mut scenarios) = (HashMap::new(), Vec::<Scenario>::new());
    for text in std::fs::read_to_string(path).expect("the scenarios").lines() {
        let line = Line::cut(text, &defines);
        match line.word(0) {
            "end" => (),
            word if word.is_empty() || word.starts_with('#') => (),
            "define" => {
                defines.insert(line.word(1).to_string(), line.word(2).to_string());
            }
            "scenario" => {
                let worlds = (2..line.words.len()).map(|index| line.integer(index) as u32).collect();
                scenarios.push(Scenario { name: line.word(1).to_string(), worlds, lines: Vec::new() });
            }
            _ => scenarios.last_mut().expect("a scenario").lines.push(line),
        }
    }
    scenarios
}
