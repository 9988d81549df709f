//! `[cors]` section of `gateway.toml`: origins whose scripts may call the gateway.

use gateway_core::cors::Cors;
use serde::Deserialize;

/// Raw section.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCors {
    origins: Vec<String>,
    max_age_s: Option<i64>,
}

impl RawCors {
    /// Validates the section; returns all problems.
    pub(super) fn read(self) -> Result<Cors, Vec<String>> {
        let RawCors { origins, max_age_s } = self;
        Cors::read(origins, max_age_s)
    }
}
