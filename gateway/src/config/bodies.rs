//! `[bodies]` section of `gateway.toml`: memory limits and minimum rate of request bodies.

use crate::body_memory::{BodyLimits, FILE_BYTES_MAX, MEMORY_DEFAULT, PROGRESS_DEFAULT};
use configuration::{ConfigFile, section};
use gateway_core::{memory, progress};
use replica_api::limits::MAX_BODY_BYTES;
use std::time::Duration;

section! {
    /// Memory limits and minimum rate of request bodies.
    pub(super) partial struct BodiesSection {
        /// Memory of all bodies in bytes; at least the maximum size of one, like the next two.
        bytes_max: usize = MEMORY_DEFAULT.total, in MAX_BODY_BYTES..;
        /// Memory of the bodies of one tenant; a quarter of `bytes_max` if absent.
        bytes_per_tenant_max: Option<usize>, in MAX_BODY_BYTES..;
        /// Memory of the bodies of one connection, except those of `trusted_peers`; 64 MiB if absent.
        bytes_per_connection_max: Option<usize>, in MAX_BODY_BYTES..;
        /// Largest file of a batch in bytes, at most `bytes_per_tenant_max`; 100 MiB, or that memory, if absent. The region that
        /// stores the file has a limit as well (`file_bytes_max` of its `[jobs]`).
        file_bytes_max: Option<usize>, in 1..;
        /// Minimum average rate of a body in bytes per second, after its first `stall`.
        bytes_per_second_min: u64 = PROGRESS_DEFAULT.bytes_per_second, in 1..;
        /// Maximum time without progress.
        stall: Duration = PROGRESS_DEFAULT.stall, in Duration::from_millis(1)..;
    }
}

impl BodiesSection {
    /// Validates the section. `total` is the timeout for a complete body.
    pub(super) fn read(self, document: &ConfigFile<'_>, total: Duration) -> Option<BodyLimits> {
        let of_all = self.bytes_max?;
        for (key, part) in [
            ("bytes_per_tenant_max", self.bytes_per_tenant_max),
            ("bytes_per_connection_max", self.bytes_per_connection_max),
        ] {
            if let Some(part) = part.flatten().filter(|part| *part > of_all) {
                let problem =
                    format!("{part} exceeds bodies.bytes_max ({of_all}); lower it or raise bytes_max");
                document.problem(&format!("bodies.{key}"), problem);
            }
        }
        // Defaults are a share of `bytes_max` where only that is set.
        let memory = memory::Limits {
            total: of_all,
            per_tenant: self.bytes_per_tenant_max?.unwrap_or((of_all / 4).max(MAX_BODY_BYTES)),
            per_connection: self
                .bytes_per_connection_max?
                .unwrap_or(MEMORY_DEFAULT.per_connection.min(of_all)),
        };
        let progress =
            progress::Limits { stall: self.stall?, bytes_per_second: self.bytes_per_second_min?, total };
        let file_bytes_max = self.file_bytes_max?.unwrap_or(FILE_BYTES_MAX.min(memory.per_tenant));
        if file_bytes_max > memory.per_tenant {
            let problem = format!(
                "{file_bytes_max} exceeds the memory of the bodies of one tenant ({}); lower it or raise \
                 bodies.bytes_per_tenant_max",
                memory.per_tenant
            );
            document.problem("bodies.file_bytes_max", problem);
        }
        Some(BodyLimits { memory, progress, file_bytes_max, senders_are_gateways: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: Duration = Duration::from_secs(60);

    /// Reads the section from a whole file.
    fn read(text: &str) -> Result<BodyLimits, Vec<String>> {
        section! {
            /// File with the section.
            struct File {
                /// Section.
                bodies: BodiesSection;
            }
        }
        let read = ConfigFile::read(&format!("[bodies]\n{text}"), |document| {
            document.section::<File>()?.bodies.read(document, TOTAL)
        });
        read.map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn absent_keys_have_their_defaults() {
        let (memory, progress) = (MEMORY_DEFAULT, PROGRESS_DEFAULT);
        assert_eq!(
            read(""),
            Ok(BodyLimits { memory, progress, file_bytes_max: FILE_BYTES_MAX, senders_are_gateways: false })
        );
        let less = read("bytes_max = 67108864").unwrap().memory;
        assert_eq!((less.per_tenant, less.per_connection), (MAX_BODY_BYTES, 2 * MAX_BODY_BYTES));
        assert!(read("bytes = 1").is_err_and(|problems| problems[0].contains("unknown key")));
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
        rejected("bytes_per_tenant_max = 536870913", "bytes_max");
        rejected("bytes_per_second_min = 0", "bodies.bytes_per_second_min");
        rejected("stall = '0s'", "bodies.stall");
        rejected("stall = 'soon'", "bodies.stall");
    }
}
