//! `[bodies]` section of `gateway.toml`: memory limits and minimum rate of request bodies.

use super::timeouts::duration;
use crate::request_body::{BodyLimits, MEMORY_DEFAULT, PROGRESS_DEFAULT};
use gateway_core::{memory, progress};
use replica_api::limits::MAX_BODY_BYTES;
use serde::Deserialize;
use std::time::Duration;

/// Raw section. An absent key has its default.
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
    /// Validates the section, and reports all problems. `total` is the timeout for a complete body.
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
            match usize::try_from(number).ok().filter(|number| *number >= MAX_BODY_BYTES) {
                Some(number) => number,
                None => {
                    problems.push(format!(
                        "bodies.{key} = {number} is less than the maximum size of one body, {MAX_BODY_BYTES}; \
                         raise it to at least that, or remove it for the default {absent}"
                    ));
                    absent
                }
            }
        };
        let of_all = bytes("bytes_max", bytes_max, MEMORY_DEFAULT.total);
        // Defaults are a share of `bytes_max` where only that is set.
        let per_tenant = (of_all / 4).max(MAX_BODY_BYTES);
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
                    "bodies.{key} = {part} exceeds bodies.bytes_max ({of_all}); lower it or raise bytes_max"
                ));
            }
        }
        let bytes_per_second = match bytes_per_second_min.map(u64::try_from) {
            None => PROGRESS_DEFAULT.bytes_per_second,
            Some(Ok(rate @ 1..)) => rate,
            Some(_) => {
                let default = PROGRESS_DEFAULT.bytes_per_second;
                problems.push(format!(
                    "bodies.bytes_per_second_min is less than 1; set the minimum rate in bytes a second, or remove it \
                     for the default {default}"
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
                        "bodies.stall = \"{text}\" is not a positive duration; write it as \"500ms\", \"10s\" or \"2m\""
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
    fn absent_keys_have_their_defaults() {
        let (memory, progress) = (MEMORY_DEFAULT, PROGRESS_DEFAULT);
        assert_eq!(read(""), Ok(BodyLimits { memory, progress, senders_are_gateways: false }));
        let less = read("bytes_max = 67108864").unwrap().memory;
        assert_eq!((less.per_tenant, less.per_connection), (MAX_BODY_BYTES, 2 * MAX_BODY_BYTES));
        assert!(read("bytes = 1").is_err_and(|problems| problems[0].contains("unknown field")));
    }

    #[test]
    fn a_limit_is_accepted_at_its_bounds_and_rejected_past_them() {
        let rejected = |text: &str, word: &str| {
            let problems = read(text).expect_err(text);
            assert!(problems.len() == 1 && problems[0].contains(word), "{text}: {problems:?}");
        };
        let body = MAX_BODY_BYTES;
        let limits = read(&format!(
            "bytes_max = {body}\nbytes_per_tenant_max = {body}\nbytes_per_connection_max = {body}\n\
             bytes_per_second_min = 1\nstall = '1ms'"
        ));
        let limits = limits.unwrap();
        assert_eq!(limits.memory, memory::Limits { total: body, per_tenant: body, per_connection: body });
        assert_eq!((limits.progress.stall, limits.progress.bytes_per_second), (Duration::from_millis(1), 1));
        rejected(&format!("bytes_per_tenant_max = {}", body - 1), "bodies.bytes_per_tenant_max");
        rejected("bytes_per_connection_max = -1", "bodies.bytes_per_connection_max");
        rejected("bytes_per_tenant_max = 536870913", "bodies.bytes_max");
        rejected("bytes_per_second_min = 0", "bodies.bytes_per_second_min");
        rejected("stall = '0s'", "bodies.stall");
        rejected("stall = 'soon'", "bodies.stall");
    }
}
