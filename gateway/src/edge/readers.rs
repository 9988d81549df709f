//! Redirects of requests for content that a region does not return through this gateway, because the residency policy of the
//! content does not allow the region of the gateway.
//!
//! The region decides ([`crate::ingress`]), and names the policy in a header. The gateway knows where the other gateways are.
//! It does not fetch the content from one of them, since the content would then pass through this gateway as well.

use super::jobs::JobForwarder;
use crate::config::ReaderGateways;
use crate::respond::Rejection;
use crate::upstream::UpstreamResponse;
use regions::catalogue::Catalogue;
use regions::residency::ResidencyPolicy;
use regions::set::RegionIndex;
use replica_api::error::ErrorCode;
use replica_api::headers;

impl JobForwarder {
    /// Rejects a response by which a region rejects a request for content, with a redirect if another gateway may return it.
    pub(super) fn check_content_redirect(
        &self,
        response: &UpstreamResponse,
        path: &str,
    ) -> Result<(), Rejection> {
        let text = |name: &str| response.head.headers.get(name).and_then(|value| value.to_str().ok());
        let is_not_permitted = text(headers::ERROR) == Some(ErrorCode::RegionNotPermitted.as_str());
        // Without a policy, the message of the region says what to do.
        let policy =
            text(headers::RESIDENCY).filter(|_| is_not_permitted).and_then(|policy| policy.parse().ok());
        let Some(policy) = policy else { return Ok(()) };
        let config = &self.responder.config;
        let here = self.catalogue.index_of(&config.region).expect("the region was found in the catalogue");
        Err(redirect(&policy, path, here, &config.readers, &self.catalogue))
    }
}

/// Returns the redirect to the gateway that may return the content at `path`.
fn redirect(
    policy: &ResidencyPolicy,
    path: &str,
    here: RegionIndex,
    gateways: &ReaderGateways,
    catalogue: &Catalogue,
) -> Rejection {
    let here_id = &catalogue.region(here).id;
    let reason = format!(
        "The content of '{path}' is returned only through a gateway in a region that the residency policy '{policy}' allows, and \
         this gateway is in {here_id}"
    );
    match gateways.nearest(policy, here, catalogue) {
        Some(url) => {
            let location = format!("{url}{path}");
            let message = format!("{reason}; send the request to {location}.");
            Rejection::new(ErrorCode::ReadElsewhere, message).with(vec![(LOCATION_HEADER, location)])
        }
        None => {
            let message = format!(
                "{reason}; send the request to a gateway in such a region, and ask the operator to name it in [[jobs.gateway]] of \
                 this one, which then redirects to it."
            );
            Rejection::new(ErrorCode::RegionNotPermitted, message)
        }
    }
}

/// Name of the header with the URL of a redirect.
const LOCATION_HEADER: &str = "location";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gateway_in_an_allowed_region_the_rejection_names_the_policy_and_the_fix() {
        let catalogue = Catalogue::builtin();
        let here = catalogue.index_of(&"aws/us-east-1".parse().expect("a region")).expect("known");
        let policy = "eu".parse().expect("a policy");
        let rejection = redirect(
            &policy,
            "/v1/async/job_1.aws.eu-central-1",
            here,
            &ReaderGateways::default(),
            &catalogue,
        );
        assert_eq!((rejection.code, rejection.headers), (ErrorCode::RegionNotPermitted, Vec::new()));
        for part in ["'/v1/async/job_1.aws.eu-central-1'", "'eu'", "aws/us-east-1", "[[jobs.gateway]]"] {
            assert!(rejection.message.contains(part), "{part} in {}", rejection.message);
        }
    }
}
