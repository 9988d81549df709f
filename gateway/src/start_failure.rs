//! Rejection of a request for a deployment that has failed, at a region and at a gateway.
//!
//! It has the word of the reason and a sentence about it. The text of the failure itself is for operators: it may name files
//! of the host and sources of models.

use regions::id::DeploymentName;
use replica_api::error::ErrorCode;
use replica_api::start_failure::StartFailure;

use crate::respond::Rejection;

/// Returns the rejection; `places` names the regions in which it has failed. It has no time for a retry, because
/// the time of the correction is unknown.
pub(crate) fn deployment_failed(
    deployment: &DeploymentName,
    places: &str,
    reason: StartFailure,
) -> Rejection {
    let message = format!(
        "The deployment '{deployment}' has failed in {places} ({}): {}. An operator must correct it; the request was not \
         computed.",
        reason.as_str(),
        sentence(reason)
    );
    Rejection::new(ErrorCode::DeploymentFailed, message)
}

/// Returns what a reason means.
fn sentence(reason: StartFailure) -> &'static str {
    match reason {
        StartFailure::ModelMissing => "the source has no such model",
        StartFailure::ModelForbidden => "the source denies access to the model",
        StartFailure::ModelUnavailable => "the source of the model does not respond",
        StartFailure::ModelCorrupt => "the files of the model are incomplete or damaged",
        StartFailure::UnknownFamily => "the engine does not support the family of the model",
        StartFailure::DiskFull => "the disk of the replicas is full",
        StartFailure::CrashLoop => "its replicas end before they are ready",
        StartFailure::Other => "its replicas cannot start",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_has_the_reason_and_the_places_and_the_rejection_no_retry_after() {
        for reason in StartFailure::ALL {
            let rejection = deployment_failed(&"m".parse().unwrap(), "region aws/us-east-1", reason);
            assert_eq!((rejection.code, rejection.retry_after), (ErrorCode::DeploymentFailed, None));
            for part in ["'m'", "aws/us-east-1", reason.as_str(), sentence(reason)] {
                assert!(rejection.message.contains(part), "{part} in {}", rejection.message);
            }
        }
    }
}
