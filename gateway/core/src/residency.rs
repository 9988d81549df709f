//! Residency policy of one request, as a type without which nothing is sent.
//!
//! [`AllowedRegions`] is the set of regions that may see a request. It is made from policies, never from a set of
//! regions, and can only be narrowed. A body is sealed under it, a connection is opened under it, and [`send`] is the
//! only access to the content of either: it takes a sealed body and an open connection and nothing else. So new code
//! that sends requests (a retry, a hedge, a sub-request) cannot bypass the residency policy.
//!
//! The third argument of [`send`] is the proven identity of the other end: a [`Peer`]. A region is named by an address,
//! and an address can lead anywhere; so a connection that was opened to one region is not used if another region
//! responds there. A peer with another certificate is rejected during the handshake, like any external input; here it
//! is only asserted that none gets this far.
//!
//! ```
//! use gateway_core::residency::{AllowedRegions, Peer, send};
//! use regions::catalogue::Catalogue;
//!
//! let catalogue = Catalogue::builtin();
//! let policy = AllowedRegions::of_policy(&"eu".parse().unwrap(), &catalogue);
//! let europe = catalogue.index_of(&"gcp/europe-west4".parse().unwrap()).unwrap();
//! let america = catalogue.index_of(&"aws/us-east-1".parse().unwrap()).unwrap();
//! let connection = policy.open(europe, "10.0.0.7:7100").unwrap();
//! assert_eq!(send(policy.seal("{}"), connection, Peer::UNPROVEN), ("{}", "10.0.0.7:7100"));
//! assert!(policy.open(america, "10.0.0.8:7100").is_err());
//! ```
//!
//! A body that was not sealed is not sent, nor one to a mere address:
//!
//! ```compile_fail,E0308
//! use gateway_core::residency::{AllowedRegions, Peer, send};
//! # use regions::set::RegionIndex;
//!
//! fn wrong(policy: AllowedRegions, region: RegionIndex) {
//!     let connection = policy.open(region, "10.0.0.7:7100").unwrap();
//!     send("{}", connection, Peer::UNPROVEN);
//! }
//! ```
//!
//! ```compile_fail,E0308
//! use gateway_core::residency::{AllowedRegions, Peer, send};
//!
//! fn wrong(policy: AllowedRegions) {
//!     send(policy.seal("{}"), "10.0.0.7:7100", Peer::UNPROVEN);
//! }
//! ```
//!
//! A connection, a policy or a proven identity cannot be constructed directly, and a body cannot be taken out of its
//! seal:
//!
//! ```compile_fail,E0423
//! use gateway_core::residency::Peer;
//! # use regions::set::RegionIndex;
//!
//! fn wrong(region: RegionIndex) -> Peer {
//!     Peer(Some(region))
//! }
//! ```
//!
//! ```compile_fail,E0451
//! use gateway_core::residency::RegionConnection;
//! # use regions::set::RegionIndex;
//!
//! fn wrong(region: RegionIndex) -> RegionConnection<&'static str> {
//!     RegionConnection { region, address: "10.0.0.8:7100" }
//! }
//! ```
//!
//! ```compile_fail,E0451
//! use gateway_core::residency::AllowedRegions;
//! # use regions::set::RegionSet;
//!
//! fn wrong() -> AllowedRegions {
//!     AllowedRegions { allowed: RegionSet::all(8) }
//! }
//! ```
//!
//! ```compile_fail,E0616
//! use gateway_core::residency::SealedBody;
//!
//! fn wrong(sealed: SealedBody<Vec<u8>>) -> Vec<u8> {
//!     sealed.body
//! }
//! ```
//!
//! The policies of two requests have the same type, so the compiler cannot detect a body of one with a connection of
//! the other; that is the purpose of the assertion in [`send`].

use regions::catalogue::Catalogue;
use regions::deployment::Deployment;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use regions::spiffe::{Role, SpiffeId, WrongPeer};
use std::ops::Deref;
use std::sync::Arc;

/// Regions that may see one request. It can be read as a set; a set cannot be converted into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedRegions {
    allowed: RegionSet,
}

/// Residency policy of a request as text: all that is reported about it once the regions are resolved.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Residency {
    text: Arc<str>,
    locked: bool,
}

/// Body that can only be read by [`send`].
#[derive(Clone, Debug)]
pub struct SealedBody<B> {
    allowed: RegionSet,
    body: B,
}

/// Connection to an allowed region.
#[derive(Clone, Copy, Debug)]
pub struct RegionConnection<A> {
    region: RegionIndex,
    address: A,
}

/// Proven identity of the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(Option<RegionIndex>);

/// The residency policy does not allow this region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forbidden;

impl AllowedRegions {
    /// Returns the allowed regions of a deployment: those that its residency policy allows and its list of regions, if
    /// any, contains.
    pub fn of(deployment: &Deployment, catalogue: &Catalogue) -> AllowedRegions {
        AllowedRegions {
            allowed: deployment.residency.permitted(catalogue).intersect(deployment.placement(catalogue)),
        }
    }

    /// Returns the allowed regions of a policy alone, as at a region's ingress.
    pub fn of_policy(policy: &ResidencyPolicy, catalogue: &Catalogue) -> AllowedRegions {
        AllowedRegions { allowed: policy.permitted(catalogue) }
    }

    /// Returns the intersection with a policy.
    #[must_use]
    pub fn narrowed(self, policy: &ResidencyPolicy, catalogue: &Catalogue) -> AllowedRegions {
        AllowedRegions { allowed: self.allowed.intersect(policy.permitted(catalogue)) }
    }

    /// Returns the intersection with other allowed regions.
    #[must_use]
    pub fn and(self, other: AllowedRegions) -> AllowedRegions {
        AllowedRegions { allowed: self.allowed.intersect(other.allowed) }
    }

    /// Seals a body under this policy.
    pub fn seal<B>(&self, body: B) -> SealedBody<B> {
        SealedBody { allowed: self.allowed, body }
    }

    /// Opens a connection to `region` at `address`.
    ///
    /// # Errors
    ///
    /// If the residency policy does not allow the region.
    pub fn open<A>(&self, region: RegionIndex, address: A) -> Result<RegionConnection<A>, Forbidden> {
        if self.allowed.contains(region) { Ok(RegionConnection { region, address }) } else { Err(Forbidden) }
    }
}

impl<A> RegionConnection<A> {
    /// Returns the region.
    pub fn region(&self) -> RegionIndex {
        self.region
    }

    /// Returns the address.
    pub fn address(&self) -> &A {
        &self.address
    }
}

impl Peer {
    /// No identity is proven: the connection is without TLS, by configuration, or within a region.
    pub const UNPROVEN: Peer = Peer(None);

    /// Verifies the name `shown` of an ingress's certificate; `own` is the name of this process.
    ///
    /// # Errors
    ///
    /// If it is no region of this fleet, or it has another residency policy than in the catalogue.
    pub fn proven(
        role: Role,
        shown: &SpiffeId,
        own: &SpiffeId,
        catalogue: &Catalogue,
    ) -> Result<Peer, WrongPeer> {
        shown.verify_as(&[role], None, own, Some(catalogue)).map(Peer)
    }
}

impl Residency {
    /// Makes the text of this policy.
    pub fn of(policy: &ResidencyPolicy) -> Residency {
        Residency { text: policy.to_string().into(), locked: *policy != ResidencyPolicy::Anywhere }
    }

    /// Returns the policy, even if it has no condition.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns whether the policy has a condition.
    pub fn is_locked(&self) -> bool {
        self.locked
    }
}

impl Deref for AllowedRegions {
    type Target = RegionSet;

    fn deref(&self) -> &RegionSet {
        &self.allowed
    }
}

/// Returns the body and the address for sending; invariant 1 (Residency) is asserted here.
///
/// # Panics
///
/// If the body's policy does not allow the region of the connection, which was opened under another policy; or if the
/// peer has proven to be another region.
pub fn send<B, A>(body: SealedBody<B>, connection: RegionConnection<A>, peer: Peer) -> (B, A) {
    assert!(
        body.allowed.contains(connection.region),
        "a request is sent only where it is allowed (invariant 1, Residency)"
    );
    assert!(
        peer.0.is_none_or(|proven| proven == connection.region),
        "a request is sent only to the region that it was opened to (invariant 1, Residency)"
    );
    (body.body, connection.address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn allowed(policy: &str) -> AllowedRegions {
        AllowedRegions::of_policy(&policy.parse().unwrap(), &Catalogue::builtin())
    }

    fn region(id: &str) -> RegionIndex {
        Catalogue::builtin().index_of(&id.parse().unwrap()).unwrap()
    }

    #[test]
    fn a_connection_is_opened_only_where_the_policy_allows() {
        let open = |policy: &str, id: &str| allowed(policy).open(region(id), ()).is_ok();
        assert!(open("eu", "gcp/europe-west4"));
        assert!(!open("eu", "aws/us-east-1"));
        assert!(open("eu,us", "aws/us-east-1"));
        let both = allowed("eu,us").narrowed(&"us".parse().unwrap(), &Catalogue::builtin());
        assert!(both.open(region("aws/us-east-1"), ()).is_ok());
        assert_eq!(both.open(region("gcp/europe-west4"), ()).err(), Some(Forbidden));
    }

    #[test]
    #[should_panic(expected = "invariant 1, Residency")]
    fn a_body_of_one_request_is_not_sent_over_the_connection_of_another() {
        let american = allowed("us").open(region("aws/us-east-1"), ()).unwrap();
        send(allowed("eu").seal(()), american, Peer::UNPROVEN);
    }

    fn peer(name: &str) -> Peer {
        let own = "spiffe://m/gateway/aws/us-east-1/in/us-va".parse().unwrap();
        Peer::proven(Role::Spoke, &name.parse().unwrap(), &own, &Catalogue::builtin()).unwrap()
    }

    #[test]
    fn a_body_is_sent_to_the_region_that_proved_its_identity() {
        let european = allowed("eu").open(region("gcp/europe-west4"), "there").unwrap();
        let proven = peer("spiffe://m/spoke/gcp/europe-west4/in/nl");
        assert_eq!(send(allowed("eu").seal("body"), european, proven), ("body", "there"));
    }

    #[test]
    #[should_panic(expected = "opened to (invariant 1, Residency)")]
    fn a_body_is_not_sent_to_a_region_that_responds_at_the_address_of_another() {
        let european = allowed("eu").open(region("gcp/europe-west4"), ()).unwrap();
        send(allowed("eu").seal(()), european, peer("spiffe://m/spoke/aws/us-east-1/in/us-va"));
    }

    proptest! {
        #[test]
        fn a_policy_only_ever_narrows(policies in prop::collection::vec(
            prop::sample::select(vec!["eu", "us", "jp", "eu,us", "gcp/europe-west4", "us,jp"]), 1..6,
        )) {
            let catalogue = Catalogue::builtin();
            let mut regions = allowed(policies[0]);
            for policy in &policies {
                let narrower = regions.narrowed(&policy.parse().unwrap(), &catalogue);
                prop_assert!(narrower.is_subset(&regions));
                regions = narrower;
            }
            for region in catalogue.all().iter() {
                prop_assert_eq!(regions.open(region, ()).is_ok(), regions.contains(region));
            }
        }
    }
}
