//! Command-line options of `meridian get requests`.

use clap::Args;
use regions::id::{RegionId, TenantId};
use scheduler_api::requests::{KeptReason, known_outcome};

#[derive(Debug, Args)]
#[command(next_help_heading = "Requests")]
pub(crate) struct GetRequestsOptions {
    /// Operations port of a gateway; may be repeated, for the requests of several
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    pub operations: Vec<String>,
    /// Only requests of this tenant
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<TenantId>,
    /// Only requests with an attempt in this region
    #[arg(long, value_name = "REGION")]
    pub region: Option<RegionId>,
    /// Only requests with this outcome: an error code, ok, other_status, other_server_error, truncated, client_disconnected or shutdown
    #[arg(long, value_name = "OUTCOME", value_parser = known_outcome)]
    pub outcome: Option<String>,
    /// Only requests that arrived before then, in the format of --since: to continue a search at older requests
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// Only requests that were kept for this reason: failed, failed_over, slow, rejected or sampled
    #[arg(long, value_name = "REASON")]
    pub kept: Option<KeptReason>,
}
