//! The residency policy of one request, as a type without which nothing is sent.
//!
//! A [`AllowedRegions`] is the set of regions that may see a request. It is made from policies, never from a set of regions, and can
//! only be narrowed. A body is sealed under it, a connection is opened under it, and [`send`] is the only way to get at
//! either's inside: it takes a sealed body and an open connection and nothing else. So whoever writes a new exit (a retry,
//! a hedge, a piece of a scattered request) cannot write one that the residency policy was not asked about.
//!
//! The third thing that [`send`] takes is what the one at the other end has proven of itself: a [`Peer`]. A region is named
//! by an address, and an address can lead anywhere; so what was opened to one region is not sent to another that answers
//! there. A peer whose certificate says so is turned away while the connection is made, as everything that comes from
//! outside; that it never gets as far as here is what is asserted.
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
//! A connection is not made up, nor is a policy, nor what a peer has proven, nor is a body taken out of its seal:
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
//! use gateway_core::residency::Conn;
//! # use regions::set::RegionIndex;
//!
//! fn wrong(region: RegionIndex) -> Conn<&'static str> {
//!     Conn { region, address: "10.0.0.8:7100" }
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
//! use gateway_core::residency::Body;
//!
//! fn wrong(sealed: Body<Vec<u8>>) -> Vec<u8> {
//!     sealed.body
//! }
//! ```
//!
//! Two requests have two policies of one type, and the compiler does not see a body of one meet a connection of the other;
//! that is what the assertion in [`send`] is for.

use crate::spiffe::{Role, SpiffeId, WrongPeer};
use regions::catalogue::Catalogue;
use regions::deployment::Deployment;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use std::ops::Deref;
use std::sync::Arc;

/// The regions that may see one request. What it permits is read as the set that it is; no set becomes a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedRegions {
    allowed: RegionSet,
}

/// The policy that a request travels under, as it is written: all that is told of it once its policy is worked out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Residency {
    text: Arc<str>,
    locked: bool,
}

/// A body that leaves only through [`send`].
#[derive(Clone, Debug)]
pub struct Body<B> {
    allowed: RegionSet,
    body: B,
}

/// A way to a region that a policy permits.
#[derive(Clone, Copy, Debug)]
pub struct Conn<A> {
    region: RegionIndex,
    address: A,
}

/// What the one at the other end of a connection has proven of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(Option<RegionIndex>);

/// The residency policy does not permit this region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forbidden;

impl AllowedRegions {
    /// That of a deployment: where its residency permits it and where its list, if it has one, places it.
    pub fn of(deployment: &Deployment, catalogue: &Catalogue) -> AllowedRegions {
        AllowedRegions {
            allowed: deployment.residency.permitted(catalogue).intersect(deployment.placement(catalogue)),
        }
    }

    /// That of a policy alone, under which a request arrives at a region's door.
    pub fn of_policy(policy: &ResidencyPolicy, catalogue: &Catalogue) -> AllowedRegions {
        AllowedRegions { allowed: policy.permitted(catalogue) }
    }

    /// Both this and a policy.
    #[must_use]
    pub fn narrowed(self, policy: &ResidencyPolicy, catalogue: &Catalogue) -> AllowedRegions {
        AllowedRegions { allowed: self.allowed.intersect(policy.permitted(catalogue)) }
    }

    /// Both this and another.
    #[must_use]
    pub fn and(self, other: AllowedRegions) -> AllowedRegions {
        AllowedRegions { allowed: self.allowed.intersect(other.allowed) }
    }

    /// Puts a body under this policy.
    pub fn seal<B>(&self, body: B) -> Body<B> {
        Body { allowed: self.allowed, body }
    }

    /// The way to `region` at `address`, if the residency policy permits it.
    ///
    /// # Errors
    ///
    /// When it does not.
    pub fn open<A>(&self, region: RegionIndex, address: A) -> Result<Conn<A>, Forbidden> {
        if self.allowed.contains(region) { Ok(Conn { region, address }) } else { Err(Forbidden) }
    }
}

impl<A> Conn<A> {
    /// Where it leads.
    pub fn region(&self) -> RegionIndex {
        self.region
    }

    /// Through which address.
    pub fn address(&self) -> &A {
        &self.address
    }
}

impl Peer {
    /// Nothing is proven: the connection is in the clear, because whoever runs this wants it so, or within a region.
    pub const UNPROVEN: Peer = Peer(None);

    /// The door of the region that `shown`, the name in its certificate, has; `own` is the name of who asks.
    ///
    /// # Errors
    ///
    /// When it is no region of this fleet, or under another policy than the catalogue has.
    pub fn proven(shown: &SpiffeId, own: &SpiffeId, catalogue: &Catalogue) -> Result<Peer, WrongPeer> {
        shown.stands(Role::Region, own, catalogue).map(|region| Peer(Some(region)))
    }
}

impl Residency {
    /// Of this policy.
    pub fn of(policy: &ResidencyPolicy) -> Residency {
        Residency { text: policy.to_string().into(), locked: *policy != ResidencyPolicy::Anywhere }
    }

    /// The policy, also where it has no condition.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it has a condition.
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

/// What goes to the wire, and where to: invariant 1 (Residency), where it is used.
///
/// # Panics
///
/// When the body's policy does not permit the region of the connection, which was opened under another one; or when the peer
/// has proven to be another region.
pub fn send<B, A>(body: Body<B>, connection: Conn<A>, peer: Peer) -> (B, A) {
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
    fn a_way_is_open_where_the_policy_permits_and_nowhere_else() {
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
    fn a_body_of_one_request_does_not_leave_over_the_connection_of_another() {
        let american = allowed("us").open(region("aws/us-east-1"), ()).unwrap();
        send(allowed("eu").seal(()), american, Peer::UNPROVEN);
    }

    fn peer(name: &str) -> Peer {
        let own = "spiffe://m/gateway/aws/us-east-1/in/us-va".parse().unwrap();
        Peer::proven(&name.parse().unwrap(), &own, &Catalogue::builtin()).unwrap()
    }

    #[test]
    fn a_body_leaves_to_the_region_that_proved_to_be_the_one_that_was_meant() {
        let european = allowed("eu").open(region("gcp/europe-west4"), "there").unwrap();
        let met = peer("spiffe://m/region/gcp/europe-west4/in/nl");
        assert_eq!(send(allowed("eu").seal("body"), european, met), ("body", "there"));
    }

    #[test]
    #[should_panic(expected = "opened to (invariant 1, Residency)")]
    fn a_body_does_not_leave_to_a_region_that_answers_under_the_address_of_another() {
        let european = allowed("eu").open(region("gcp/europe-west4"), ()).unwrap();
        send(allowed("eu").seal(()), european, peer("spiffe://m/region/aws/us-east-1/in/us-va"));
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
