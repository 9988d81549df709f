//! Rejection of a request for a deployment that has failed, at a region and at a gateway.
//!
//! It has the word of the reason and a sentence about it. The text of the failure itself is for operators: it may name files
//! of the host and sources of models.

use std::fmt::Display;

use regions::id::DeploymentName;
use replica_api::error::ErrorCode;
use replica_api::start_failure::StartFailure;

use crate::respond::Rejection;

/// Returns the rejection of a deployment that has failed in these regions. It has no time for a retry, because the time of
/// the correction is unknown.
pub(crate) fn deployment_failed(
    deployment: &DeploymentName,
    failures: impl IntoIterator<Item = (impl Display, StartFailure)>,
) -> Rejection {
    let each = failures
        .into_iter()
        .map(|(region, reason)| format!("{region} ({}: {})", reason.as_str(), sentence(reason)));
    let places = each.collect::<Vec<_>>().join(" and ");
    let message = format!(
        "The deployment '{deployment}' has failed in {places}. An operator must correct it; the request was not computed."
    );
    Rejection::new(ErrorCode::DeploymentFailed, message)
}

/// Returns what a reason means.
fn sentence(reason: StartFailure) -> &'static str {
    match reason {
        StartFailure::ModelMissing => "the source has no such model",
        StartFailure::ModelForbidden => "the source denies access to the model",
        StartFailure::ModelUnavailable => "the source of the model does not respond",
        StartFailure::ModelCorrupt => "the files of the model are incomplete, damaged or invalid",
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
    fn the_message_has_the_reason_of_each_region_and_the_rejection_no_retry_after() {
        for reason in StartFailure::ALL {
            let failures = [("aws/us-east-1", reason), ("gcp/europe-west4", StartFailure::DiskFull)];
            let rejection = deployment_failed(&"m".parse().unwrap(), failures);
            assert_eq!((rejection.code, rejection.retry_after), (ErrorCode::DeploymentFailed, None));
            let first =
                format!("'m' has failed in aws/us-east-1 ({}: {})", reason.as_str(), sentence(reason));
            for part in [first.as_str(), " and gcp/europe-west4 (disk_full: "] {
                assert!(rejection.message.contains(part), "{part} in {}", rejection.message);
            }
        }
    }
}
