//! The names of the headers that Meridian reads and writes, each in one place.

/// The identifier of a request, ours or the client's; on every answer.
pub const REQUEST_ID: &str = "x-request-id";
/// In: how long the client is willing to wait, in milliseconds. Between processes: what is left of it.
pub const TIMEOUT_MS: &str = "x-meridian-timeout-ms";
/// In: `interactive` or `bulk`; without it the number of inputs decides. Between processes: the priority that the edge has
/// decided on. Out: the same, where it is not the one that was asked for.
pub const PRIORITY: &str = "x-meridian-priority";
/// In: narrows where the request may go. Between processes: the whole policy that the request travels under.
pub const RESIDENCY: &str = "x-meridian-residency";
/// In, from trusted peers only: `lat,lon` of the client; used for choosing, never for policy.
pub const CLIENT_GEO: &str = "x-meridian-client-geo";
/// In: the API key, in the place of `authorization: Bearer`.
pub const API_KEY: &str = "api-key";
/// In: as [`API_KEY`].
pub const X_API_KEY: &str = "x-api-key";
/// Out: the region that answered; of a request that was computed in pieces all of them, with commas between, in the order
/// of the inputs.
pub const REGION: &str = "x-meridian-region";
/// Out: how many attempts the answer took, over all pieces.
pub const ATTEMPTS: &str = "x-meridian-attempts";
/// Out, where a request was split: into how many parts. Each takes one attempt, so what [`ATTEMPTS`] says beyond this number
/// are retries, hedges and failovers; where it is absent, what it says beyond one.
pub const PARTS: &str = "x-meridian-parts";
/// Out, on errors: the [`crate::wire::error::ErrorCode`].
pub const ERROR: &str = "x-meridian-error";
/// Between processes: the deployment that the gateway read from the body, so that nobody reads it again.
pub const DEPLOYMENT: &str = "x-meridian-deployment";
/// Between processes: whose request it is. Equal inputs share work and cached rows within a tenant only; without it
/// everybody is one tenant.
pub const TENANT: &str = "x-meridian-tenant";
/// Between processes: which attempt at the request this is, from 1.
pub const ATTEMPT: &str = "x-meridian-attempt";
/// Between processes: the key of the attempt, by which the receipts of both ends are joined: 16 hexadecimal digits that the
/// gateway process drew, '-', and a number.
pub const ATTEMPT_KEY: &str = "x-meridian-attempt-key";
/// Between processes: this request is another region's overflow, and was paid for with what the region that it comes to has
/// granted.
pub const OVERFLOW: &str = "x-meridian-overflow";
/// Between processes: in what time another region that may see the request, and has a replica ready, would answer it. With
/// it a region that has none knows whether to keep the request.
pub const ELSEWHERE_MS: &str = "x-meridian-elsewhere-ms";
/// Out: the revision of the model that computed the answer ([`regions::ModelRevision`]). From a gateway to a region: the
/// revision by the gateway's route table, for a region that has no table itself. From a region to a replica: the revision
/// that the answer must be of; a replica of another one refuses.
pub const MODEL_REVISION: &str = "x-meridian-model-revision";
/// From a gateway to a region: the answer must be of this revision, because other parts of it are already.
pub const REQUIRED_REVISION: &str = "x-meridian-required-revision";
/// Out: for how long the request was held because no replica was ready.
pub const HELD_MS: &str = "x-meridian-held-ms";
/// Out, beside [`HELD_MS`]: how long the replica took to be ready, from when the first request found none.
pub const COLD_START_MS: &str = "x-meridian-cold-start-ms";
/// Out: tokens that were computed, by which limits are settled.
pub const TOKENS: &str = "x-meridian-tokens";
/// Out, on answers of locked deployments: the identifier of the receipt that says where the request was sent.
pub const RECEIPT: &str = "x-meridian-residency-receipt";
/// Out: where the time went (W3C Server Timing).
pub const SERVER_TIMING: &str = "server-timing";
