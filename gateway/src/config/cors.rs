//! `[cors]` of `gateway.toml`: the web pages whose scripts may call the gateway.

use gateway_core::cors::Cors;
use serde::Deserialize;

/// As written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCors {
    origins: Vec<String>,
    max_age_s: Option<i64>,
}

impl RawCors {
    /// Checks what was written, with all problems together.
    pub(super) fn read(self) -> Result<Cors, Vec<String>> {
        let RawCors { origins, max_age_s } = self;
        Cors::read(origins, max_age_s)
    }
}
