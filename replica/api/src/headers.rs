//! Names of the headers that Meridian reads and writes.
//!
//! *In*: from clients. *Out*: to clients. *Internal*: between processes of Meridian.

/// In and out: identifier of a request, chosen by the client or by Meridian; on every response.
pub const REQUEST_ID: &str = "x-request-id";
/// In: deadline of the client, in milliseconds. Internal: the remaining time.
pub const TIMEOUT_MS: &str = "x-meridian-timeout-ms";
/// In: `interactive` or `bulk`; without it the number of inputs decides. Internal: the effective priority, as decided
/// by the edge. Out: the effective priority, if the request specified another.
pub const PRIORITY: &str = "x-meridian-priority";
/// In: restricts the allowed regions. Internal: the complete residency policy of the request.
pub const RESIDENCY: &str = "x-meridian-residency";
/// In, from trusted peers only: `lat,lon` of the client; used for region selection, never for the residency policy.
pub const CLIENT_GEO: &str = "x-meridian-client-geo";
/// In: the API key, instead of `authorization: Bearer`.
pub const API_KEY: &str = "api-key";
/// In: same as [`API_KEY`].
pub const X_API_KEY: &str = "x-api-key";
/// In, for a job, a file or a batch: repeated requests with the same key create one. A gateway chooses one for a job if the client
/// does not.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// In, for a job: milliseconds until the client has no use for the result; then the job expires.
pub const DEADLINE_MS: &str = "x-meridian-deadline-ms";
/// In, for a job: milliseconds within which its computation must begin; otherwise the job expires.
pub const MAX_TIME_IN_QUEUE_MS: &str = "x-meridian-max-time-in-queue-ms";
/// In, for a job: URL that receives the result, like the field `webhook.url` of the body.
pub const WEBHOOK_URL: &str = "x-meridian-webhook-url";
/// In: with `respond-async` the request becomes a job (RFC 7240).
pub const PREFER: &str = "prefer";
/// Out: the preference that was applied (RFC 7240).
pub const PREFERENCE_APPLIED: &str = "preference-applied";
/// Out: region that computed the response; of a split request all of them, separated by commas, in the order of the
/// inputs.
pub const REGION: &str = "x-meridian-region";
/// Out: number of attempts, over all parts of the request.
pub const ATTEMPTS: &str = "x-meridian-attempts";
/// Out, for a split request: number of parts. Each part takes one attempt, so [`ATTEMPTS`] minus this number is the
/// number of retries, hedged requests and failovers. If it is absent, the number of parts is one.
pub const PARTS: &str = "x-meridian-parts";
/// Out, on errors: the [`crate::error::ErrorCode`].
pub const ERROR: &str = "x-meridian-error";
/// Internal: the deployment that the gateway parsed from the body, so that it is not parsed again.
pub const DEPLOYMENT: &str = "x-meridian-deployment";
/// Internal: the tenant of the request. Equal inputs share work and cached rows within a tenant only; requests without
/// this header belong to one common tenant.
pub const TENANT: &str = "x-meridian-tenant";
/// Internal, about jobs, files and batches: region of the gateway that sends the request, by which the region of the content
/// decides whether the gateway may return it.
pub const GATEWAY_REGION: &str = "x-meridian-gateway-region";
/// Internal, for an uploaded file: its name, as a JSON string in ASCII.
pub const FILE_NAME: &str = "x-meridian-file-name";
/// Internal, for an uploaded file: the deployments that it names and that the tenant may use, separated by commas.
pub const FILE_MODELS: &str = "x-meridian-file-models";
/// Internal: number of this attempt at the request, from 1.
pub const ATTEMPT: &str = "x-meridian-attempt";
/// Internal: key of the attempt, by which the receipts of both ends are joined: 16 random hexadecimal digits of the
/// gateway process, '-', and a number.
pub const ATTEMPT_KEY: &str = "x-meridian-attempt-key";
/// Internal: this request is spillover of another region, and uses credit that the receiving region has granted.
pub const SPILLOVER: &str = "x-meridian-spillover";
/// Internal: estimated time in which another allowed region with a ready replica would serve the request. A region
/// without a ready replica uses it to decide whether to hold the request.
pub const ALTERNATIVE_MS: &str = "x-meridian-alternative-ms";
/// Out: revision of the model that computed the response ([`regions::ModelRevision`]). From a gateway to a region: the
/// revision in the gateway's route table, for a region that has no table itself. From a region to a replica: the
/// required revision of the response; a replica with another revision rejects the request.
pub const MODEL_REVISION: &str = "x-meridian-model-revision";
/// From a gateway to a region: required revision of the response, because other parts of it have been computed with it.
pub const REQUIRED_REVISION: &str = "x-meridian-required-revision";
/// Out: milliseconds for which the request was held because no replica was ready.
pub const HELD_MS: &str = "x-meridian-held-ms";
/// Out, with [`HELD_MS`]: milliseconds until a replica was ready, from the first request that found none.
pub const COLD_START_MS: &str = "x-meridian-cold-start-ms";
/// Out: computed tokens, which are charged to the rate limits.
pub const TOKENS: &str = "x-meridian-tokens";
/// Out, on responses of locked deployments: identifier of the receipt that records the region of the request.
pub const RECEIPT: &str = "x-meridian-residency-receipt";
/// Out, on errors with the remedy to wait: time to wait in milliseconds, since `retry-after` has whole seconds; OpenAI's
/// clients read this header first.
pub const RETRY_AFTER_MS: &str = "retry-after-ms";
/// Out, on errors with the remedy to wait: seconds until the same request may succeed.
pub const RETRY_AFTER: &str = "retry-after";
/// Out: requests per second that the tenant may send. This and the following five are OpenAI's headers.
pub const RATELIMIT_LIMIT_REQUESTS: &str = "x-ratelimit-limit-requests";
/// Out: remaining requests.
pub const RATELIMIT_REMAINING_REQUESTS: &str = "x-ratelimit-remaining-requests";
/// Out: time until all requests are available again.
pub const RATELIMIT_RESET_REQUESTS: &str = "x-ratelimit-reset-requests";
/// Out: tokens per minute that the tenant may use.
pub const RATELIMIT_LIMIT_TOKENS: &str = "x-ratelimit-limit-tokens";
/// Out: remaining tokens.
pub const RATELIMIT_REMAINING_TOKENS: &str = "x-ratelimit-remaining-tokens";
/// Out: time until all tokens are available again.
pub const RATELIMIT_RESET_TOKENS: &str = "x-ratelimit-reset-tokens";
/// In: span of the caller (W3C Trace Context). Internal: span of the attempt.
pub const TRACEPARENT: &str = "traceparent";
/// In: state of the caller's trace (W3C Trace Context); forwarded up to 512 bytes.
pub const TRACESTATE: &str = "tracestate";
/// Out: duration of each stage (W3C Server Timing).
pub const SERVER_TIMING: &str = "server-timing";
