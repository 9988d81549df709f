//! Every sentence with which the edge says no by itself: what is wrong, the limit, what to do.

use super::duration::openai_duration;
use super::policy_clock::TooOld;
use super::view::View;
use crate::respond::Rejection;
use gateway_core::body::{self, BodyProblem};
use gateway_core::bucket::Shortfall;
use gateway_core::endpoint::{Endpoint, NotServed};
use gateway_core::jwt::{TOKEN_BYTES_MAX, TokenProblem};
use gateway_core::keys::KeyProblem;
use gateway_core::request_options::{HeaderProblem, TIMEOUT_MAX};
use gateway_core::residency::Residency;
use gateway_core::route::RejectReason;
use gateway_core::scatter::INPUTS_MAX;
use gateway_core::scatter::split::TooManyInputs;
use gateway_core::shed::{Shed, ShedReason};
use gateway_core::tenant::{LimitExceeded, LimitKind, Tenant};
use regions::catalogue::Catalogue;
use regions::deployment::Deployment;
use regions::id::DeploymentName;
use regions::residency::{PolicyError, ResidencyPolicy};
use regions::set::RegionSet;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use std::time::Duration;

pub(super) fn not_served(problem: NotServed) -> Rejection {
    match problem {
        NotServed::Path => {
            let served: Vec<_> = Endpoint::served().collect();
            Rejection::new(ErrorCode::NotFound, format!("No such path; there are {}.", served.join(", ")))
        }
        NotServed::Method(wanted) => {
            let message = format!("This path is served with {wanted} only.");
            // RFC 9110, 15.5.6 and 9.3.2.
            let allowed = if wanted == "GET" { "GET, HEAD" } else { wanted };
            Rejection::new(ErrorCode::MethodNotAllowed, message).with(vec![("allow", allowed.to_owned())])
        }
    }
}

pub(super) fn not_let_in(problem: KeyProblem) -> Rejection {
    let message = match problem {
        KeyProblem::Missing => {
            "There is no API key; send the header 'authorization: Bearer KEY', 'api-key: KEY' or 'x-api-key: KEY'."
        }
        KeyProblem::Several => {
            "The headers 'authorization', 'api-key' and 'x-api-key' carry different API keys; send one of them."
        }
        KeyProblem::NotBearer => "The header 'authorization' is not of the form 'Bearer KEY'.",
        KeyProblem::Unknown => {
            "This API key is not known here; check it, or ask whoever runs this gateway for one."
        }
    };
    let challenge = vec![("www-authenticate", "Bearer".to_owned())];
    Rejection::new(ErrorCode::InvalidApiKey, message).of("authorization").with(challenge)
}

/// What is wrong with a token, without a word of it.
pub(super) fn bad_token(problem: TokenProblem) -> Rejection {
    let message = match problem {
        TokenProblem::TooLong => {
            return invalid_token(format!(
                "The token has more than {TOKEN_BYTES_MAX} bytes; leave claims out of it."
            ));
        }
        TokenProblem::Malformed => "The token is no JWT: three parts in base64url, two of them JSON objects.",
        TokenProblem::Header => {
            "The token's header is not one that is taken here: 'alg' must be RS256, ES256, EdDSA or HS256, 'typ' JWT or \
             at+jwt, and there may be no 'crit'."
        }
        TokenProblem::Issuer => "The token's issuer ('iss') is not known here.",
        TokenProblem::Key => {
            "The issuer has no key here of the token's 'kid' and 'alg'; if its keys have just changed, try again shortly."
        }
        TokenProblem::Signature => "The token's signature is not that of its issuer.",
        TokenProblem::Audience => "The token is for somebody else: 'aud' does not name this gateway.",
        TokenProblem::Times => {
            "The token needs 'exp', and 'exp', 'nbf' and 'iat' must be numbers of seconds."
        }
        TokenProblem::Expired => "The token has expired ('exp'); get a new one.",
        TokenProblem::NotYet => {
            "The token is not valid yet ('nbf', 'iat'); compare the clocks of issuer and gateway."
        }
        TokenProblem::Tenant => {
            "The token names no tenant that its issuer speaks for here; ask whoever runs this gateway."
        }
    };
    invalid_token(message)
}

fn invalid_token(message: impl Into<String>) -> Rejection {
    let challenge = vec![("www-authenticate", "Bearer error=\"invalid_token\"".to_owned())];
    Rejection::new(ErrorCode::InvalidToken, message).of("authorization").with(challenge)
}

pub(super) fn no_table_yet() -> Rejection {
    Rejection::new(
        ErrorCode::NoCapacityInAllowedRegions,
        "This gateway has no route table yet: it has just started and no hub has answered. Try again shortly.",
    )
}

/// A request that is under way may not go on, because of a newer route table.
pub(super) fn no_longer_known() -> Rejection {
    let message = "The API key or tenant of this request was removed while it was under way; ask the operator of this gateway \
                   for another key.";
    let challenge = vec![("www-authenticate", "Bearer".to_owned())];
    Rejection::new(ErrorCode::InvalidApiKey, message).of("authorization").with(challenge)
}

pub(super) fn no_region(deployment: &DeploymentName, residency: &Residency, tenant: &Tenant) -> Rejection {
    let message = format!(
        "No region may serve '{deployment}' under the residency '{}', which is that of the deployment, of the tenant '{}' \
         and of {} together; widen the last or leave it out.",
        residency.as_str(),
        tenant.id,
        headers::RESIDENCY
    );
    Rejection::new(ErrorCode::RegionNotPermitted, message).of(headers::RESIDENCY)
}

/// When to come back to a gateway that is cut off from every hub.
const CUT_OFF_RETRY_AFTER: Duration = Duration::from_secs(30);

pub(super) fn policy_too_old(TooOld { age, max }: TooOld) -> Rejection {
    let message = format!(
        "This deployment is locked to regions, and no hub has confirmed its residency policy to this gateway for {} minutes, \
         longer than policy_max_age ({} minutes). Restore the connection between this gateway and a hub, or use another gateway.",
        age.as_secs() / 60,
        max.as_secs() / 60
    );
    Rejection::new(ErrorCode::PolicyTooOld, message).after(CUT_OFF_RETRY_AFTER)
}

pub(super) fn no_receipt() -> Rejection {
    Rejection::new(
        ErrorCode::ReceiptUnavailable,
        "This deployment is locked, and every request to it must leave a receipt, which this gateway cannot write at the \
         moment. Try again shortly.",
    )
}

pub(super) fn unreadable_ask(problem: HeaderProblem) -> Rejection {
    let (param, message) = match problem {
        HeaderProblem::Timeout => (
            headers::TIMEOUT_MS,
            format!(
                "{} is not a whole number of milliseconds from 1 to {}.",
                headers::TIMEOUT_MS,
                TIMEOUT_MAX.as_millis()
            ),
        ),
        HeaderProblem::Residency(why) => {
            (headers::RESIDENCY, format!("{} cannot be read: {why}.", headers::RESIDENCY))
        }
        HeaderProblem::Priority => {
            (headers::PRIORITY, format!("{} is neither 'interactive' nor 'bulk'.", headers::PRIORITY))
        }
        HeaderProblem::ClientGeo(why) => {
            (headers::CLIENT_GEO, format!("{} cannot be read: {why}.", headers::CLIENT_GEO))
        }
    };
    Rejection::new(ErrorCode::InvalidHeader, message).of(param)
}

/// The policies of deployment, tenant and header fit each by itself and not together.
pub(super) fn residency_too_long(
    deployment: &DeploymentName,
    tenant: &Tenant,
    error: &PolicyError,
) -> Rejection {
    let message = format!(
        "{}, the residency of the deployment '{deployment}' and that of the tenant '{}' are one policy together: {error}.",
        headers::RESIDENCY,
        tenant.id
    );
    Rejection::new(ErrorCode::InvalidHeader, message).of(headers::RESIDENCY)
}

pub(super) fn no_bulk(tenant: &Tenant) -> Rejection {
    let message = format!(
        "The tenant '{}' has no bulk priority; leave out {}, or ask whoever runs this gateway for one.",
        tenant.id,
        headers::PRIORITY
    );
    Rejection::new(ErrorCode::PriorityNotPermitted, message).of(headers::PRIORITY)
}

/// No region is permitted to this request. Of the policies that meet in it, the message names those that together leave
/// none: only where the deployment's and the tenant's leave some, it is the header that the client sent.
pub(super) fn no_region_permitted(
    tenant: &Tenant,
    deployment: &Deployment,
    of_deployment: RegionSet,
    asked: &ResidencyPolicy,
    catalogue: &Catalogue,
) -> Rejection {
    let Deployment { name, residency, .. } = deployment;
    let (of_tenant, id) = (&tenant.residency, &tenant.id);
    let message = if of_deployment.is_empty() {
        format!(
            "The deployment '{name}' permits no region that this gateway knows (its residency is '{residency}'); its \
             operator has to change that."
        )
    } else if of_deployment.intersect(of_tenant.permitted(catalogue)).is_empty() {
        format!(
            "No region is permitted: the residency of the deployment '{name}' is '{residency}', that of the tenant '{id}' is \
             '{of_tenant}', and no region of the deployment is in both; whoever runs this gateway has to change one of them."
        )
    } else {
        let message = format!(
            "The header {} ('{asked}') leaves no region: the deployment '{name}' permits '{residency}' and the tenant '{id}' \
             '{of_tenant}'; name an area within both, or leave the header out.",
            headers::RESIDENCY
        );
        return Rejection::new(ErrorCode::RegionNotPermitted, message).of(headers::RESIDENCY);
    };
    Rejection::new(ErrorCode::RegionNotPermitted, message)
}

pub(super) fn unreadable_body(problem: BodyProblem) -> Rejection {
    match problem {
        BodyProblem::NotJson { at, expected } => Rejection::new(
            ErrorCode::InvalidJson,
            format!("The body is not a JSON object: at byte {at} there should be {expected}."),
        ),
        BodyProblem::TooDeep => Rejection::new(
            ErrorCode::InvalidJson,
            format!("The body nests deeper than {} levels.", body::NESTING_MAX),
        ),
        BodyProblem::ModelNotText => {
            Rejection::new(ErrorCode::InvalidValue, "The field 'model' is not a string.").of("model")
        }
        BodyProblem::ModelTwice => {
            Rejection::new(ErrorCode::InvalidValue, "The field 'model' is there more than once.").of("model")
        }
    }
}

/// How many names an unknown one is answered with.
const NAMES_LISTED_MAX: usize = 20;

pub(super) fn unknown_model(model: &str, view: &View, tenant: &Tenant) -> Rejection {
    let model: String = model.chars().take(100).collect();
    let message = format!("The model '{model}' does not exist; there are: {}.", known_models(view, tenant));
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
        "The request does not say which model; ask at /deployments/NAME{path} or add the field 'model'. There are: {}.",
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
        "The field '{field}' has {given} elements and one request may have {INPUTS_MAX}; split it into {} requests.",
        given.div_ceil(INPUTS_MAX)
    );
    Rejection::new(ErrorCode::TooManyInputs, message).of(field)
}

/// A tenant cannot pay for a request: not now, or never.
pub(super) fn beyond_limits(tenant: &Tenant, exceeded: LimitExceeded) -> Rejection {
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
                "The tenant '{id}' may use {limit} {what} ({key}) and has used them up; try again in {}.",
                openai_duration(wait)
            );
            Rejection::new(ErrorCode::RateLimited, message).after(wait)
        }
        Shortfall::Never => {
            let message = format!(
                "The tenant '{id}' may use {limit} {what} ({key}) and this request alone has more, so waiting does \
                 not help; send no more than {limit} {unit} in one request."
            );
            Rejection::new(never, message)
        }
    }
}

/// There is too much for all.
pub(super) fn shed(tenant: &Tenant, why: Shed) -> Rejection {
    let Shed { reason, wait, retry_after } = why;
    let (wait, soon) = (openai_duration(wait), openai_duration(retry_after));
    let (code, message) = match reason {
        ShedReason::OverShare => (
            ErrorCode::Overloaded,
            format!(
                "There is not room for all, and the tenant '{}' has more in flight than its share (a request would wait \
                 {wait}); send less at once, or try again in {soon}.",
                tenant.id
            ),
        ),
        ShedReason::NoCapacity => (
            ErrorCode::Saturated,
            format!("There is no room: a request would wait {wait}; try again in {soon}."),
        ),
        ShedReason::BulkPaused => (
            ErrorCode::Saturated,
            format!("There is no room for bulk while lookups are turned away; try again in {soon}."),
        ),
        ShedReason::DeadlineTooShort => (
            ErrorCode::Saturated,
            format!(
                "A request would wait {wait}, longer than this one may take; give it more time with {} (up to {}), or \
                 try again in {soon}.",
                headers::TIMEOUT_MS,
                TIMEOUT_MAX.as_millis()
            ),
        ),
    };
    Rejection::new(code, message).after(retry_after)
}

pub(super) fn deadline_passed(timeout: Duration) -> Rejection {
    let message = format!(
        "There was no answer within {} ms; give the request more time with {} (up to {}) or send fewer inputs.",
        timeout.as_millis(),
        headers::TIMEOUT_MS,
        TIMEOUT_MAX.as_millis()
    );
    Rejection::new(ErrorCode::DeadlineExceeded, message)
}

/// Why a region could not take a request.
pub(super) fn in_words(reason: RejectReason) -> &'static str {
    match reason {
        RejectReason::ForbiddenByResidency => "forbidden",
        RejectReason::NotServing => "no replica ready",
        RejectReason::Down => "down",
    }
}
