//! Gateways through which content may leave the region: results of jobs, contents of files, and errors that may quote an input.
//!
//! A gateway decrypts what it returns, so content passes only through a gateway whose own region these policies allow: the one
//! under which the content was accepted, the newest one of its deployments, and the newest one of its tenant. The region of the
//! gateway is that of its certificate; without mutual TLS it is what the gateway states.
//!
//! Status without content is returned through any gateway.
//!
//! The same policies decide which gateways may take requests of jobs to other regions, and to which ones ([`super::transfers`]).

use crate::ingress::request::{text, unreadable};
use crate::ingress::residency::ResidencyGuard;
use crate::listener::{PeerKind, peer};
use crate::respond::Rejection;
use jobs_core::transfer::TransferGroup;
use pingora::protocols::http::ServerSession;
use regions::catalogue::Catalogue;
use regions::id::RegionId;
use regions::residency::ResidencyPolicy;
use regions::set::RegionIndex;
use replica_api::error::ErrorCode;
use replica_api::headers;

/// Gateway of a request about jobs, files or batches.
pub(super) struct RequestingGateway {
    /// Its region; unknown for a gateway of an earlier version without a certificate.
    region: Option<RegionIndex>,
    /// Newest policy of the tenant.
    of_tenant: ResidencyPolicy,
}

impl RequestingGateway {
    /// Reads the gateway and the policy of the tenant from a request.
    pub(super) fn of(session: &ServerSession, catalogue: &Catalogue) -> Result<RequestingGateway, Rejection> {
        let stated = || -> Result<Option<RegionIndex>, Rejection> {
            let region = text(session, headers::GATEWAY_REGION)?.map(str::parse::<RegionId>).transpose();
            let region = region.map_err(|error| unreadable(headers::GATEWAY_REGION, &error))?;
            Ok(region.and_then(|region| catalogue.index_of(&region)))
        };
        let region = match peer(session) {
            Some(PeerKind::Gateway(proven)) => proven,
            Some(PeerKind::Client | PeerKind::Spoke | PeerKind::Unauthenticated) | None => stated()?,
        };
        let of_tenant = match text(session, headers::RESIDENCY)? {
            Some(policy) => {
                policy.parse::<ResidencyPolicy>().map_err(|error| unreadable(headers::RESIDENCY, &error))?
            }
            None => ResidencyPolicy::Anywhere,
        };
        Ok(RequestingGateway { region, of_tenant })
    }
}

/// Returns the residency policy of a submission as text, to be stored with it.
pub(super) fn accepted_policy(session: &ServerSession) -> Result<Option<String>, Rejection> {
    let policy = text(session, headers::RESIDENCY)?;
    Ok(Some(policy.map_or_else(|| ResidencyPolicy::Anywhere.to_string(), str::to_owned)))
}

impl ResidencyGuard {
    /// Rejects a request for the content of `id` if it may not be returned through this gateway. `accepted` is the policy that
    /// was stored with the content.
    pub(super) fn check_content_policy<'a>(
        &self,
        gateway: &RequestingGateway,
        id: &str,
        accepted: Option<&str>,
        deployments: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), Rejection> {
        let mut policies = vec![gateway.of_tenant.clone()];
        if let Some(accepted) = accepted {
            policies.push(accepted.parse::<ResidencyPolicy>().map_err(|error| {
                // A later version has accepted the content. Upgrade this spoke.
                let message = format!(
                    "The content of '{id}' is not returned, because region {} cannot read its residency policy: {error}.",
                    self.region
                );
                Rejection::new(ErrorCode::RegionNotPermitted, message)
            })?);
        }
        {
            let spoke = self.spoke.lock();
            let newest =
                deployments.into_iter().filter_map(|name| spoke.residency_policy(&name.parse().ok()?));
            policies.extend(newest.cloned());
        }
        policies.retain(|policy| *policy != ResidencyPolicy::Anywhere);
        if policies.is_empty() {
            return Ok(());
        }
        if !is_permitted(&policies, gateway.region, &self.catalogue) {
            return Err(content_not_permitted(
                id,
                &policies,
                gateway.region.map(|region| &self.catalogue.region(region).id),
            ));
        }
        self.check_policy_age()
    }

    /// Returns whether the gateway may have the payloads of the jobs of a group, and send them to the region `target` if one is
    /// given. The newest policy of the tenant is known to the gateway, which applies it as well.
    pub(super) fn permits_transfer(
        &self,
        gateway: &RequestingGateway,
        group: &TransferGroup,
        target: Option<RegionIndex>,
    ) -> bool {
        // A policy that a later version has accepted is not understood here.
        let Ok(accepted) = group.residency.parse::<ResidencyPolicy>() else { return false };
        let Ok(deployment) = group.deployment.parse() else { return false };
        let newest = self.spoke.lock().residency_policy(&deployment).cloned();
        let mut policies = vec![accepted, newest.unwrap_or(ResidencyPolicy::Anywhere)];
        policies.retain(|policy| *policy != ResidencyPolicy::Anywhere);
        let is_permitted = |region| is_permitted(&policies, region, &self.catalogue);
        is_permitted(gateway.region)
            && target.is_none_or(|target| is_permitted(Some(target)))
            && (policies.is_empty() || self.check_policy_age().is_ok())
    }
}

impl ResidencyGuard {
    /// Returns whether this region may export the spans of a job or a batch: the policy under which it was accepted and the newest
    /// ones of its deployments allow it.
    pub(super) fn permits_trace<'a>(
        &self,
        accepted: Option<&str>,
        deployments: impl IntoIterator<Item = &'a str>,
    ) -> bool {
        // A policy that a later version has accepted is not understood here.
        let Ok(accepted) = accepted.map_or(Ok(ResidencyPolicy::Anywhere), str::parse) else { return false };
        let mut policies = vec![accepted];
        {
            let spoke = self.spoke.lock();
            let newest =
                deployments.into_iter().filter_map(|name| spoke.residency_policy(&name.parse().ok()?));
            policies.extend(newest.cloned());
        }
        is_permitted(&policies, Some(self.here), &self.catalogue)
    }
}

/// Returns whether content under these policies may be returned through a gateway in `region`.
fn is_permitted(policies: &[ResidencyPolicy], region: Option<RegionIndex>, catalogue: &Catalogue) -> bool {
    policies.iter().all(|policy| {
        *policy == ResidencyPolicy::Anywhere
            || region.is_some_and(|region| policy.permitted(catalogue).contains(region))
    })
}

/// Returns the rejection of a request for content. The header has the policies together, from which the gateway finds another
/// one that is permitted.
fn content_not_permitted(id: &str, policies: &[ResidencyPolicy], region: Option<&RegionId>) -> Rejection {
    let narrow = |policy: ResidencyPolicy, next| policy.narrow_checked(next);
    let together = policies.iter().try_fold(ResidencyPolicy::Anywhere, narrow);
    let gateway = match region {
        Some(region) => format!("this one is in {region}"),
        None => "this one has not stated its region".to_owned(),
    };
    let (policy, headers) = match together {
        Ok(policy) => (format!("'{policy}'"), vec![(headers::RESIDENCY, policy.to_string())]),
        // Too long for one policy.
        Err(_) => {
            let each: Vec<_> = policies.iter().map(|policy| format!("'{policy}'")).collect();
            (each.join(" and "), Vec::new())
        }
    };
    let message = format!(
        "The content of '{id}' is returned only through a gateway in a region that the residency policy {policy} allows, and \
         {gateway}; send the request to such a gateway."
    );
    Rejection::new(ErrorCode::RegionNotPermitted, message).with(headers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_core::spoke::Spoke;
    use std::sync::Arc;
    use supervision::Mutex;

    fn policies(texts: &[&str]) -> Vec<ResidencyPolicy> {
        texts.iter().map(|text| text.parse().expect("a policy")).collect()
    }

    #[test]
    fn content_is_returned_only_where_every_policy_allows() {
        let catalogue = Catalogue::builtin();
        for (texts, region, expected) in [
            (&[][..], None, true),
            (&["anywhere"], None, true),
            (&["anywhere"], Some("aws/us-east-1"), true),
            (&["eu"], Some("aws/eu-central-1"), true),
            (&["eu"], Some("aws/us-east-1"), false),
            (&["eu"], None, false),
            (&["eu", "anywhere"], Some("aws/us-east-1"), false),
            (&["anywhere", "eu,us", "us"], Some("aws/us-east-1"), true),
            (&["eu,us", "eu"], Some("aws/us-east-1"), false),
            (&["eu & us"], Some("aws/us-east-1"), false),
        ] {
            let region = region.map(|region| catalogue.index_of(&region.parse().expect("a region")));
            let region = region.map(|region| region.expect("a region of the catalogue"));
            assert_eq!(is_permitted(&policies(texts), region, &catalogue), expected, "{texts:?} {region:?}");
        }
    }

    #[test]
    fn spans_are_exported_only_in_a_region_that_the_accepted_policy_allows() {
        let catalogue = Arc::new(Catalogue::builtin());
        let guard = |region: &str| {
            let region: RegionId = region.parse().expect("a region");
            let here = catalogue.index_of(&region).expect("a region of the catalogue");
            let spoke = Arc::new(Mutex::new(Spoke::new(region.clone(), 1, Vec::new())));
            ResidencyGuard { region, here, catalogue: catalogue.clone(), spoke }
        };
        for (accepted, in_europe, in_america) in [
            (None, true, true),
            (Some("anywhere"), true, true),
            (Some("eu"), true, false),
            (Some("eu,us"), true, true),
            (Some("a policy of a later version"), false, false),
        ] {
            let permits = |region| guard(region).permits_trace(accepted, ["minilm"]);
            let found = ["aws/eu-central-1", "aws/us-east-1"].map(permits);
            assert_eq!(found, [in_europe, in_america], "{accepted:?}");
        }
    }

    #[test]
    fn a_rejection_names_the_policies_together() {
        let region = "aws/us-east-1".parse().expect("a region");
        let rejection = content_not_permitted("job_1", &policies(&["eu,us", "eu"]), Some(&region));
        let together = policies(&["eu,us"])[0].narrow_checked(&policies(&["eu"])[0]).expect("a short policy");
        assert_eq!(rejection.headers, [(headers::RESIDENCY, together.to_string())]);
        assert!(rejection.message.contains("aws/us-east-1"), "{}", rejection.message);
        let list = |cloud: &str| (100..400).map(|n| format!("{cloud}/r-{n}")).collect::<Vec<_>>().join(",");
        let rejection = content_not_permitted("job_1", &policies(&[&list("aws"), &list("gcp")]), None);
        assert_eq!(rejection.headers, []);
    }
}
