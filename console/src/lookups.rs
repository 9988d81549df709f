//! Requests whose routing decision a person looks up: the hub requests it from all gateways, and the one that served it has it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use scheduler_api::plan::GatewayBoot;
use scheduler_api::traffic::{EXPLANATIONS_MAX, ExplainedRequest};
use serde_json::Value;

use crate::searches::SEARCH_TTL;

/// Time limit of a lookup, which reads the disks of gateways as a search does.
pub const LOOKUP_TTL: Duration = SEARCH_TTL;
/// Maximum number of lookups of one visitor within [`LOOKUP_TTL`]: half of all, so that one visitor does not use up all.
pub const VISITOR_LOOKUPS_MAX: usize = EXPLANATIONS_MAX / 2;

/// Result of a lookup.
#[derive(Clone, Debug, PartialEq)]
pub enum LookupResult {
    /// Gateways have not responded yet.
    Pending,
    /// The routing decision, and the region of the gateway that served the request.
    Found(String, Value),
    /// No gateway has the request.
    Unknown,
    /// A gateway, whose region is named, could not read its disk for this reason, and the others do not have the request.
    Failed(String, String),
    /// Some gateways have not responded in time, and the others do not have the request.
    TimedOut,
}

/// Lookups in progress, and those that have just ended, by the identifier of the request.
#[derive(Debug, Default)]
pub struct Lookups(BTreeMap<String, Lookup>);

#[derive(Debug)]
struct Lookup {
    /// Name of the visitor who started it.
    visitor: String,
    waiting: BTreeSet<GatewayBoot>,
    /// First gateway that could not read its disk, by its region, and the reason.
    problem: Option<(String, String)>,
    result: LookupResult,
    until: Instant,
}

/// The maximum number of lookups is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyLookups;

impl Lookups {
    /// Starts the lookup of a request at these gateways, for a visitor. One that is in progress continues.
    ///
    /// # Errors
    ///
    /// When [`EXPLANATIONS_MAX`] have been started within [`LOOKUP_TTL`], as more do not fit into a message, or
    /// [`VISITOR_LOOKUPS_MAX`] by this visitor.
    pub fn start(
        &mut self,
        (id, visitor): (&str, &str),
        gateways: BTreeSet<GatewayBoot>,
        now: Instant,
    ) -> Result<(), TooManyLookups> {
        self.0.retain(|_, lookup| lookup.until > now);
        if self.0.get(id).is_some_and(|lookup| lookup.result == LookupResult::Pending) {
            return Ok(());
        }
        let others = || self.0.iter().filter(|(known, _)| known.as_str() != id);
        let own = others().filter(|(_, lookup)| lookup.visitor == visitor);
        if others().count() >= EXPLANATIONS_MAX || own.count() >= VISITOR_LOOKUPS_MAX {
            return Err(TooManyLookups);
        }
        let result = if gateways.is_empty() { LookupResult::Unknown } else { LookupResult::Pending };
        let (visitor, until) = (visitor.to_owned(), now + LOOKUP_TTL);
        self.0.insert(id.to_owned(), Lookup { visitor, waiting: gateways, problem: None, result, until });
        Ok(())
    }

    /// Returns the requests that a gateway has not explained yet.
    pub fn pending_for(&mut self, gateway: &GatewayBoot, now: Instant) -> Vec<String> {
        self.0.retain(|_, lookup| lookup.until > now);
        let pending = self
            .0
            .iter()
            .filter(|(_, lookup)| lookup.result == LookupResult::Pending && lookup.waiting.contains(gateway));
        pending.map(|(id, _)| id.clone()).collect()
    }

    /// Records what a gateway has of a request. Returns whether the lookup has ended.
    pub fn record(&mut self, gateway: &GatewayBoot, id: &str, explained: ExplainedRequest) -> bool {
        let Some(lookup) = self.0.get_mut(id) else { return false };
        let was_waiting = lookup.waiting.remove(gateway);
        if lookup.result != LookupResult::Pending || !was_waiting {
            return false;
        }
        match explained {
            Ok(Some(explanation)) => {
                lookup.result = LookupResult::Found(gateway.region.to_string(), explanation);
                return true;
            }
            Ok(None) => {}
            Err(problem) => {
                lookup.problem.get_or_insert_with(|| (gateway.region.to_string(), problem));
            }
        }
        if !lookup.waiting.is_empty() {
            return false;
        }
        lookup.result = match lookup.problem.take() {
            Some((region, problem)) => LookupResult::Failed(region, problem),
            None => LookupResult::Unknown,
        };
        true
    }

    /// Returns the result of a lookup that was started.
    pub fn result(&self, id: &str, now: Instant) -> LookupResult {
        let lookup = self.0.get(id).filter(|lookup| lookup.until > now);
        lookup.map_or(LookupResult::TimedOut, |lookup| lookup.result.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use serde_json::json;

    fn gateway(boot_id: u64) -> GatewayBoot {
        GatewayBoot { region: "aws/us-east-1".parse().unwrap(), boot_id }
    }

    #[test]
    fn the_gateway_that_has_the_request_ends_the_lookup() {
        let (mut lookups, now) = (Lookups::default(), some_instant());
        lookups.start(("r", "ada"), BTreeSet::from([gateway(1), gateway(2)]), now).unwrap();
        assert_eq!(lookups.pending_for(&gateway(1), now), ["r"]);
        assert!(!lookups.record(&gateway(1), "r", Ok(None)));
        assert_eq!(lookups.pending_for(&gateway(1), now), [""; 0], "it has responded");
        assert!(!lookups.record(&gateway(3), "r", Ok(Some(json!("forged")))), "it is not one of them");
        assert_eq!(lookups.result("r", now), LookupResult::Pending);
        assert!(lookups.record(&gateway(2), "r", Ok(Some(json!(1)))));
        assert_eq!(lookups.result("r", now), LookupResult::Found("aws/us-east-1".to_owned(), json!(1)));
    }

    #[test]
    fn a_request_that_no_gateway_has_is_unknown() {
        let (mut lookups, now) = (Lookups::default(), some_instant());
        lookups.start(("r", "ada"), BTreeSet::from([gateway(1)]), now).unwrap();
        assert!(lookups.record(&gateway(1), "r", Ok(None)));
        assert_eq!(lookups.result("r", now), LookupResult::Unknown);
        lookups.start(("s", "ada"), BTreeSet::new(), now).unwrap();
        assert_eq!(lookups.result("s", now), LookupResult::Unknown, "there is no gateway");
    }

    #[test]
    fn a_disk_that_cannot_be_read_is_not_an_unknown_request_unless_another_gateway_has_it() {
        let (mut lookups, now) = (Lookups::default(), some_instant());
        let failed = || Err("the disk failed".to_owned());
        for (id, other, expected) in [
            ("r", None, LookupResult::Failed("aws/us-east-1".to_owned(), "the disk failed".to_owned())),
            ("s", Some(json!(1)), LookupResult::Found("aws/us-east-1".to_owned(), json!(1))),
        ] {
            lookups.start((id, "ada"), BTreeSet::from([gateway(1), gateway(2)]), now).unwrap();
            assert!(!lookups.record(&gateway(1), id, failed()));
            assert!(lookups.record(&gateway(2), id, Ok(other)));
            assert_eq!(lookups.result(id, now), expected);
        }
    }

    #[test]
    fn limit_of_lookups_is_enforced_and_expired_ones_free_slots() {
        let (mut lookups, now) = (Lookups::default(), some_instant());
        let gateways = BTreeSet::from([gateway(1)]);
        for number in 0..EXPLANATIONS_MAX {
            let id = number.to_string();
            lookups.start((&id, &format!("visitor-{id}")), gateways.clone(), now).unwrap();
        }
        assert_eq!(lookups.start(("more", "ada"), gateways.clone(), now), Err(TooManyLookups));
        assert_eq!(lookups.start(("0", "ada"), gateways.clone(), now), Ok(()), "it is in progress already");
        assert_eq!(lookups.start(("more", "ada"), gateways, now + LOOKUP_TTL), Ok(()));
    }

    #[test]
    fn limit_of_lookups_of_a_visitor_is_enforced_and_others_have_theirs() {
        let (mut lookups, now) = (Lookups::default(), some_instant());
        let gateways = BTreeSet::from([gateway(1)]);
        for number in 0..VISITOR_LOOKUPS_MAX {
            lookups.start((&number.to_string(), "ada"), gateways.clone(), now).unwrap();
        }
        assert_eq!(lookups.start(("more", "ada"), gateways.clone(), now), Err(TooManyLookups));
        assert_eq!(lookups.start(("more", "grace"), gateways.clone(), now), Ok(()));
        assert!(lookups.record(&gateway(1), "0", Ok(None)));
        assert_eq!(lookups.start(("0", "ada"), gateways, now), Ok(()), "it replaces one that has ended");
    }

    #[test]
    fn a_lookup_that_not_all_gateways_respond_to_times_out() {
        let (mut lookups, now) = (Lookups::default(), some_instant());
        lookups.start(("r", "ada"), BTreeSet::from([gateway(1), gateway(2)]), now).unwrap();
        assert!(!lookups.record(&gateway(1), "r", Ok(None)));
        let last = now + LOOKUP_TTL - Duration::from_millis(1);
        assert_eq!(lookups.result("r", last), LookupResult::Pending);
        assert_eq!(lookups.result("r", now + LOOKUP_TTL), LookupResult::TimedOut);
    }
}
