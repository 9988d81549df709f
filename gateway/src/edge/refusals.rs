//! Rejections that the gateway makes itself. Each message names the cause, the limit and the fix.

use super::duration::openai_duration;
use super::policy_clock::StalePolicy;
use super::view::View;
use crate::respond::Rejection;
use gateway_core::body::{self, BodyProblem};
use gateway_core::bucket::Shortfall;
use gateway_core::endpoint::{Endpoint, NotServed};
use gateway_core::keys::KeyProblem;
use gateway_core::request_options::{HeaderProblem, TIMEOUT_MAX};
use gateway_core::residency::Residency;
use gateway_core::route::RejectReason;
use gateway_core::scatter::INPUTS_MAX;
use gateway_core::scatter::split::TooManyInputs;
use gateway_core::shed::{Shed, ShedReason};
use gateway_core::tenant::{LimitExceeded, LimitKind, Tenant};
use jwt::{TOKEN_BYTES_MAX, TokenProblem};
use regions::catalogue::Catalogue;
use regions::deployment::Deployment;
use regions::id::DeploymentName;
use regions::residency::{PolicyError, ResidencyPolicy};
use regions::set::RegionSet;
use replica_api::error::ErrorCode;
use replica_api::headers;
use std::time::Duration;

/// Rejection of a path or method that the gateway does not serve.
pub(super) fn not_served(problem: NotServed) -> Rejection {
    match problem {
        NotServed::Path => {
            let served: Vec<_> = Endpoint::served().collect();
            Rejection::new(
                ErrorCode::NotFound,
                format!("This path does not exist; the paths are {}.", served.join(", ")),
            )
        }
        NotServed::Method(wanted) => {
            let message = format!("This path is served with {wanted} only.");
            // RFC 9110, 15.5.6 and 9.3.2.
            let allowed = if wanted == "GET" { "GET, HEAD" } else { wanted };
            Rejection::new(ErrorCode::MethodNotAllowed, message).with(vec![("allow", allowed.to_owned())])
        }
    }
}

/// Rejection of a request whose API key is missing, ambiguous, malformed or unknown.
pub(super) fn invalid_api_key(problem: KeyProblem) -> Rejection {
    let message = match problem {
        KeyProblem::Missing => {
            "The API key is missing; send the header 'authorization: Bearer KEY', 'api-key: KEY' or 'x-api-key: KEY'."
        }
        KeyProblem::Several => {
            "The headers 'authorization', 'api-key' and 'x-api-key' contain different API keys; send only one of \
             them."
        }
        KeyProblem::NotBearer => "The header 'authorization' is not of the form 'Bearer KEY'.",
        KeyProblem::Expired => "This API key has expired; get another one from the operator of this gateway.",
        KeyProblem::Unknown => {
            "This API key is unknown; check it, or get one from the operator of this gateway."
        }
    };
    let challenge = vec![("www-authenticate", "Bearer".to_owned())];
    Rejection::new(ErrorCode::InvalidApiKey, message).of("authorization").with(challenge)
}

/// Rejection of a token. The message contains no part of the token.
pub(super) fn invalid_token(problem: TokenProblem) -> Rejection {
    let message = match problem {
        TokenProblem::TooLong => {
            return token_rejection(format!(
                "The token is longer than {TOKEN_BYTES_MAX} bytes; remove claims from it."
            ));
        }
        TokenProblem::Malformed => {
            "The token is not a JWT: it needs three base64url parts, and the first two must be JSON objects."
        }
        TokenProblem::Header | TokenProblem::Algorithm => {
            "The header of the token is not supported: 'alg' must be RS256, ES256, EdDSA or HS256, 'typ' must be \
             JWT or at+jwt, and 'crit' must be absent."
        }
        TokenProblem::Issuer => "The issuer of the token ('iss') is not configured at this gateway.",
        TokenProblem::Key => {
            "The issuer has no key with the 'kid' and 'alg' of the token; if its keys have just changed, try \
             again shortly."
        }
        TokenProblem::Signature => "The signature of the token is not valid.",
        TokenProblem::Audience => "The token is for another audience: 'aud' does not contain this gateway.",
        TokenProblem::Times => {
            "The token needs the claim 'exp', and 'exp', 'nbf' and 'iat' must be numbers of seconds."
        }
        TokenProblem::Expired => "The token has expired ('exp'); get a new one.",
        TokenProblem::NotYet => {
            "The token is not valid yet ('nbf', 'iat'); compare the clocks of issuer and gateway."
        }
        TokenProblem::Claim => {
            "The token names no tenant that this gateway maps to its issuer; ask the operator of this gateway."
        }
    };
    token_rejection(message)
}

fn token_rejection(message: impl Into<String>) -> Rejection {
    let challenge = vec![("www-authenticate", "Bearer error=\"invalid_token\"".to_owned())];
    Rejection::new(ErrorCode::InvalidToken, message).of("authorization").with(challenge)
}

pub(super) fn no_route_table() -> Rejection {
    Rejection::new(
        ErrorCode::NoCapacityInAllowedRegions,
        "This gateway has no route table yet: it has just started and no hub has responded. Try again shortly.",
    )
}

/// Rejection of a request in flight whose API key or tenant is missing from a newer route table.
pub(super) fn key_removed() -> Rejection {
    let message = "The API key or tenant of this request was removed while it was in flight; ask the operator of \
                   this gateway for another key.";
    let challenge = vec![("www-authenticate", "Bearer".to_owned())];
    Rejection::new(ErrorCode::InvalidApiKey, message).of("authorization").with(challenge)
}

pub(super) fn no_region(deployment: &DeploymentName, residency: &Residency, tenant: &Tenant) -> Rejection {
    let message = format!(
        "No region is permitted for '{deployment}' under the residency policy '{}', the combination of the \
         policies of the deployment, of the tenant '{}' and of {}; widen the header or omit it.",
        residency.as_str(),
        tenant.id,
        headers::RESIDENCY
    );
    Rejection::new(ErrorCode::RegionNotPermitted, message).of(headers::RESIDENCY)
}

/// Retry delay of a gateway that cannot reach any hub.
const CUT_OFF_RETRY_AFTER: Duration = Duration::from_secs(30);

pub(super) fn policy_too_old(StalePolicy { age, max }: StalePolicy) -> Rejection {
    let message = format!(
        "This deployment is locked to regions, and no hub has confirmed its residency policy to this gateway for \
         {} minutes, longer than policy_max_age ({} minutes). Restore the connection between this gateway and a \
         hub, or use another gateway.",
        age.as_secs() / 60,
        max.as_secs() / 60
    );
    Rejection::new(ErrorCode::PolicyTooOld, message).after(CUT_OFF_RETRY_AFTER)
}

pub(super) fn no_receipt() -> Rejection {
    Rejection::new(
        ErrorCode::ReceiptUnavailable,
        "Requests to this deployment require a receipt, and this gateway cannot write receipts at the moment. \
         Try again shortly.",
    )
}

pub(super) fn invalid_option(problem: HeaderProblem) -> Rejection {
    let (param, message) = match problem {
        HeaderProblem::Timeout => (
            headers::TIMEOUT_MS,
            format!(
                "{} is not a whole number of milliseconds from 1 to {}.",
                headers::TIMEOUT_MS,
                TIMEOUT_MAX.as_millis()
            ),
        ),
        HeaderProblem::Residency(problem) => {
            (headers::RESIDENCY, format!("{} is not valid: {problem}.", headers::RESIDENCY))
        }
        HeaderProblem::Priority => {
            (headers::PRIORITY, format!("{} is neither 'interactive' nor 'bulk'.", headers::PRIORITY))
        }
        HeaderProblem::ClientGeo(problem) => {
            (headers::CLIENT_GEO, format!("{} is not valid: {problem}.", headers::CLIENT_GEO))
        }
    };
    Rejection::new(ErrorCode::InvalidHeader, message).of(param)
}

/// Rejection of a combination of residency policies that is too large although each policy is valid.
pub(super) fn residency_too_long(
    deployment: &DeploymentName,
    tenant: &Tenant,
    error: &PolicyError,
) -> Rejection {
    let message = format!(
        "The combination of {}, the residency policy of the deployment '{deployment}' and that of the tenant \
         '{}' is not valid: {error}.",
        headers::RESIDENCY,
        tenant.id
    );
    Rejection::new(ErrorCode::InvalidHeader, message).of(headers::RESIDENCY)
}

pub(super) fn bulk_not_permitted(tenant: &Tenant) -> Rejection {
    let message = format!(
        "The tenant '{}' may not use the bulk priority; omit {}, or ask the operator of this gateway to permit it.",
        tenant.id,
        headers::PRIORITY
    );
    Rejection::new(ErrorCode::PriorityNotPermitted, message).of(headers::PRIORITY)
}

/// Rejection of a request without a permitted region. The message names the policies that together exclude every
/// region; it names the header of the client only if the policies of deployment and tenant permit some region.
pub(super) fn no_region_permitted(
    tenant: &Tenant,
    deployment: &Deployment,
    of_deployment: RegionSet,
    header_policy: &ResidencyPolicy,
    catalogue: &Catalogue,
) -> Rejection {
    let Deployment { name, residency, .. } = deployment;
    let (of_tenant, id) = (&tenant.residency, &tenant.id);
    let message = if of_deployment.is_empty() {
        format!(
            "The residency policy '{residency}' of the deployment '{name}' permits no region of this gateway's \
             catalogue; ask the operator to change it."
        )
    } else if of_deployment.intersect(of_tenant.permitted(catalogue)).is_empty() {
        format!(
            "No region is permitted: no region of the deployment '{name}' satisfies both its residency policy \
             '{residency}' and that of the tenant '{id}', '{of_tenant}'; ask the operator of this gateway to \
             change one of them."
        )
    } else {
        let message = format!(
            "The header {} ('{header_policy}') leaves no region: the deployment '{name}' permits '{residency}' \
             and the tenant '{id}' '{of_tenant}'; name an area within both, or omit the header.",
            headers::RESIDENCY
        );
        return Rejection::new(ErrorCode::RegionNotPermitted, message).of(headers::RESIDENCY);
    };
    Rejection::new(ErrorCode::RegionNotPermitted, message)
}

pub(super) fn invalid_body(problem: BodyProblem) -> Rejection {
    match problem {
        BodyProblem::NotJson { at, expected } => Rejection::new(
            ErrorCode::InvalidJson,
            format!("The body is not a JSON object: expected {expected} at byte {at}."),
        ),
        BodyProblem::TooDeep => Rejection::new(
            ErrorCode::InvalidJson,
            format!("The body nests deeper than {} levels.", body::NESTING_MAX),
        ),
        BodyProblem::ModelNotText => {
            Rejection::new(ErrorCode::InvalidValue, "The field 'model' is not a string.").of("model")
        }
        BodyProblem::ModelTwice => {
            Rejection::new(ErrorCode::InvalidValue, "The field 'model' appears more than once; send it once.")
                .of("model")
        }
    }
}

/// Limit on the names that the rejection of an unknown model lists.
const NAMES_LISTED_MAX: usize = 20;

pub(super) fn unknown_model(model: &str, view: &View, tenant: &Tenant) -> Rejection {
    let model: String = model.chars().take(100).collect();
    let message =
        format!("The model '{model}' does not exist; the models are: {}.", known_models(view, tenant));
    Rejection::new(ErrorCode::ModelNotFound, message).of("model")
}

pub(super) fn no_model_field() -> Rejection {
    Rejection::new(
        ErrorCode::MissingField,
        "The field 'model' is missing; name one of those that GET /v1/models lists.",
    )
    .of("model")
}

pub(super) fn no_model_named(path: &str, view: &View, tenant: &Tenant) -> Rejection {
    let message = format!(
        "The request names no model; send it to /deployments/NAME{path} or add the field 'model'. The models \
         are: {}.",
        known_models(view, tenant)
    );
    Rejection::new(ErrorCode::MissingField, message).of("model")
}

fn known_models(view: &View, tenant: &Tenant) -> String {
    let mut known: Vec<_> = view
        .deployments_for(tenant)
        .take(NAMES_LISTED_MAX)
        .map(|deployment| deployment.name.as_str())
        .collect();
    if view.deployments_for(tenant).count() > NAMES_LISTED_MAX {
        known.push("… (GET /v1/models lists all)");
    }
    known.join(", ")
}

pub(super) fn too_many_inputs(problem: TooManyInputs) -> Rejection {
    let TooManyInputs { field, given } = problem;
    let message = format!(
        "The field '{field}' has {given} elements, more than the limit of {INPUTS_MAX}; split it into {} requests.",
        given.div_ceil(INPUTS_MAX)
    );
    Rejection::new(ErrorCode::TooManyInputs, message).of(field)
}

/// Rejection of a request that exceeds a rate limit of its tenant, either now or by its size alone.
pub(super) fn limit_exceeded(tenant: &Tenant, exceeded: LimitExceeded) -> Rejection {
    let LimitExceeded { kind: limited, limit, shortfall: short } = exceeded;
    let (what, unit, never) = match limited {
        LimitKind::Requests => ("requests a second", "requests", ErrorCode::RateLimited),
        LimitKind::Inputs => ("inputs a second", "inputs", ErrorCode::TooManyInputs),
        LimitKind::Tokens => ("tokens a minute", "tokens", ErrorCode::TooManyTokens),
    };
    let (id, key) = (&tenant.id, limited.as_str());
    match short {
        Shortfall::NotYet { wait } => {
            let message = format!(
                "The tenant '{id}' has reached its limit of {limit} {what} ({key}); try again in {}.",
                openai_duration(wait)
            );
            Rejection::new(ErrorCode::RateLimited, message).after(wait)
        }
        Shortfall::Never => {
            let message = format!(
                "This request alone exceeds the limit of the tenant '{id}' of {limit} {what} ({key}), so a retry \
                 cannot succeed; send at most {limit} {unit} in one request."
            );
            Rejection::new(never, message)
        }
    }
}

/// Rejection by load shedding.
pub(super) fn shed(tenant: &Tenant, problem: Shed) -> Rejection {
    let Shed { reason, wait, retry_after } = problem;
    let (wait, soon) = (openai_duration(wait), openai_duration(retry_after));
    let (code, message) = match reason {
        ShedReason::OverShare => (
            ErrorCode::Overloaded,
            format!(
                "Capacity is exhausted, and the tenant '{}' has more in flight than its share (a request would \
                 wait {wait}); send fewer requests at once, or try again in {soon}.",
                tenant.id
            ),
        ),
        ShedReason::NoCapacity => (
            ErrorCode::Saturated,
            format!("Capacity is exhausted: a request would wait {wait}; try again in {soon}."),
        ),
        ShedReason::BulkPaused => (
            ErrorCode::Saturated,
            format!(
                "Bulk requests are rejected while interactive requests are being shed; try again in {soon}."
            ),
        ),
        ShedReason::DeadlineTooShort => (
            ErrorCode::Saturated,
            format!(
                "A request would wait {wait}, longer than the timeout of this one; raise it with {} (up to {} \
                 ms), or try again in {soon}.",
                headers::TIMEOUT_MS,
                TIMEOUT_MAX.as_millis()
            ),
        ),
    };
    Rejection::new(code, message).after(retry_after)
}

pub(super) fn deadline_passed(timeout: Duration) -> Rejection {
    let message = format!(
        "No response within {} ms; raise the timeout with {} (up to {} ms) or send fewer inputs.",
        timeout.as_millis(),
        headers::TIMEOUT_MS,
        TIMEOUT_MAX.as_millis()
    );
    Rejection::new(ErrorCode::DeadlineExceeded, message)
}

/// Text of the reason for which a region is not a candidate.
pub(super) fn reject_reason_text(reason: RejectReason) -> &'static str {
    match reason {
        RejectReason::ForbiddenByResidency => "forbidden",
        RejectReason::NotServing => "no replica ready",
        RejectReason::Down => "down",
    }
}
