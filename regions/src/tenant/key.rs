//! API keys that operators create one by one, beside those of the tenants file.

use crate::id::TenantId;

/// Maximum number of created keys. Their digests do not compress: they take some 200 KB of a route table.
pub const MAX_CREATED_KEYS: usize = 4_000;
/// Maximum number of created keys of one tenant.
pub const MAX_CREATED_KEYS_PER_TENANT: usize = 64;

/// Created API key, as gateways need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKey {
    /// Tenant that it authenticates.
    pub tenant: TenantId,
    /// Time from which on it is rejected, in seconds since 1970; `None` if it does not expire.
    pub expires_at: Option<u64>,
}
