//! `[cors]` section of `gateway.toml`: origins whose scripts may call the gateway.

use configuration::{ConfigFile, section};
use gateway_core::cors::{Cors, MAX_AGE_DEFAULT_S, MAX_AGE_MAX_S, ORIGINS_MAX};

section! {
    /// Origins of web pages whose scripts may call this gateway; none without this table.
    pub(super) struct CorsSection {
        /// Scheme, host and port as browsers send them, or `["*"]` for all.
        origins: Vec<String>, in 1..=ORIGINS_MAX, fix "or leave [cors] out to allow none";
        /// Maximum time in seconds for which browsers cache a preflight response.
        max_age_s: u64 = MAX_AGE_DEFAULT_S, in 0..=MAX_AGE_MAX_S;
    }
}

impl CorsSection {
    pub(super) fn read(self, document: &ConfigFile<'_>) -> Option<Cors> {
        let CorsSection { origins, max_age_s } = self;
        Cors::read(origins, max_age_s).map_err(|found| document.problems_by_key(found)).ok()
    }
}
