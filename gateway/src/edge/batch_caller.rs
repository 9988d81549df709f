//! Sender of a request about files or batches.

use super::view::View;
use crate::request_body::BodyReader;
use gateway_core::memory::BodyOwner;
use gateway_core::tenant::Tenant;
use regions::residency::ResidencyPolicy;
use std::sync::Arc;

/// Sender of a request about files or batches.
pub(super) struct BatchCaller<'a> {
    pub(super) tenant: &'a Arc<Tenant>,
    pub(super) view: &'a View,
    /// Residency policy of the header of the request.
    pub(super) requested: &'a ResidencyPolicy,
    pub(super) body_reader: &'a BodyReader,
    /// Owner of the memory of the body.
    pub(super) owner: BodyOwner,
}
