//! `[bodies]` of `gateway.toml`: how much memory request bodies may take, and how slowly they may arrive.

use super::timeouts::duration;
use crate::intake::{BODY_BYTES_MAX, BodyLimits, MEMORY_DEFAULT, PROGRESS_DEFAULT};
use gateway_core::{memory, progress};
use serde::Deserialize;
use std::time::Duration;

/// As written: each absent key has its default.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawBodies {
    bytes_max: Option<i64>,
    bytes_per_tenant_max: Option<i64>,
    bytes_per_connection_max: Option<i64>,
    bytes_per_second_min: Option<i64>,
    stall: Option<String>,
}

impl RawBodies {
    /// Checks what was written, with all problems together. `total` is how long a body may take to arrive in all.
    pub(super) fn read(self, total: Duration, problems: &mut Vec<String>) -> BodyLimits {
        let RawBodies {
            bytes_max,
            bytes_per_tenant_max,
            bytes_per_connection_max,
            bytes_per_second_min,
            stall,
        } = self;
        let mut bytes = |key: &str, written: Option<i64>, absent: usize| {
            let Some(number) = written else { return absent };
            match usize::try_from(number).ok().filter(|number| *number >= BODY_BYTES_MAX) {
                Some(number) => number,
                None => {
                    problems.push(format!(
                        "bodies.{key} = {number} is less than one body may have, {BODY_BYTES_MAX}; give so many bytes or \
                         more, or leave it out for {absent}"
                    ));
                    absent
                }
            }
        };
        let of_all = bytes("bytes_max", bytes_max, MEMORY_DEFAULT.total);
        // A part of what there is, where only that was written.
        let per_tenant = (of_all / 4).max(BODY_BYTES_MAX);
        let per_connection = MEMORY_DEFAULT.per_connection.min(of_all);
        let memory = memory::Limits {
            total: of_all,
            per_tenant: bytes("bytes_per_tenant_max", bytes_per_tenant_max, per_tenant),
            per_connection: bytes("bytes_per_connection_max", bytes_per_connection_max, per_connection),
        };
        for (key, part) in
            [("bytes_per_tenant_max", memory.per_tenant), ("bytes_per_connection_max", memory.per_connection)]
        {
            if part > of_all {
                problems.push(format!(
                    "bodies.{key} = {part} is more than bodies.bytes_max, {of_all}; lower it or raise that"
                ));
            }
        }
        let bytes_per_second = match bytes_per_second_min.map(u64::try_from) {
            None => PROGRESS_DEFAULT.bytes_per_second,
            Some(Ok(rate @ 1..)) => rate,
            Some(_) => {
                let default = PROGRESS_DEFAULT.bytes_per_second;
                problems.push(format!(
                    "bodies.bytes_per_second_min is less than 1; write the slowest rate in bytes a second, or leave it out \
                     for {default}"
                ));
                default
            }
        };
        let stall = match stall {
            None => PROGRESS_DEFAULT.stall,
            Some(text) => match duration(&text).filter(|stall| !stall.is_zero()) {
                Some(stall) => stall,
                None => {
                    problems.push(format!(
                        "bodies.stall = \"{text}\" is no time; write one as \"500ms\", \"10s\" or \"2m\""
                    ));
                    PROGRESS_DEFAULT.stall
                }
            },
        };
        let progress = progress::Limits { stall, bytes_per_second, total };
        BodyLimits { memory, progress, senders_are_gateways: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: Duration = Duration::from_secs(60);

    fn read(text: &str) -> Result<BodyLimits, Vec<String>> {
        let raw: RawBodies = toml::from_str(text).map_err(|error| vec![error.to_string()])?;
        let mut problems = Vec::new();
        let read = raw.read(TOTAL, &mut problems);
        if problems.is_empty() { Ok(read) } else { Err(problems) }
    }

    #[test]
    fn what_is_not_written_has_its_default() {
        let (memory, progress) = (MEMORY_DEFAULT, PROGRESS_DEFAULT);
        assert_eq!(read(""), Ok(BodyLimits { memory, progress, senders_are_gateways: false }));
        let less = read("bytes_max = 67108864").unwrap().memory;
        assert_eq!((less.per_tenant, less.per_connection), (BODY_BYTES_MAX, 2 * BODY_BYTES_MAX));
        assert!(read("bytes = 1").is_err_and(|problems| problems[0].contains("unknown field")));
    }

    #[test]
    fn a_limit_is_taken_at_its_bounds_and_refused_past_them() {
        let refused = |text: &str, word: &str| {
            let problems = read(text).expect_err(text);
            assert!(problems.len() == 1 && problems[0].contains(word), "{text}: {problems:?}");
        };
        let body = BODY_BYTES_MAX;
        let limits = read(&format!(
            "bytes_max = {body}\nbytes_per_tenant_max = {body}\nbytes_per_connection_max = {body}\n\
             bytes_per_second_min = 1\nstall = '1ms'"
        ));
        let limits = limits.unwrap();
        assert_eq!(limits.memory, memory::Limits { total: body, per_tenant: body, per_connection: body });
        assert_eq!((limits.progress.stall, limits.progress.bytes_per_second), (Duration::from_millis(1), 1));
        refused(&format!("bytes_per_tenant_max = {}", body - 1), "bodies.bytes_per_tenant_max");
        refused("bytes_per_connection_max = -1", "bodies.bytes_per_connection_max");
        refused("bytes_per_tenant_max = 536870913", "bodies.bytes_max");
        refused("bytes_per_second_min = 0", "bodies.bytes_per_second_min");
        refused("stall = '0s'", "bodies.stall");
        refused("stall = 'soon'", "bodies.stall");
    }
}
