//! Requests whose routing decision a person looks up: the hub requests it from all gateways, and the one that served it has it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use scheduler_api::plan::GatewayBoot;
use scheduler_api::traffic::EXPLANATIONS_MAX;
use serde_json::Value;

/// Time limit of a lookup: some reports of a gateway.
pub const LOOKUP_TTL: Duration = Duration::from_secs(5);

/// Result of a lookup.
#[derive(Clone, Debug, PartialEq)]
pub enum LookupResult {
    /// Gateways have not responded yet.
    Pending,
    /// The routing decision, and the region of the gateway that served the request.
    Found(String, Value),
    /// No gateway has the request.
    Unknown,
}

/// Lookups in progress, and those that have just ended, by the identifier of the request.
#[derive(Debug, Default)]
pub struct Lookups(BTreeMap<String, Lookup>);

#[derive(Debug)]
struct Lookup {
    waiting: BTreeSet<GatewayBoot>,
    result: LookupResult,
    until: Instant,
}

/// The maximum number of lookups is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyLookups;

impl Lookups {
    /// Starts the lookup of a request at these gateways. One that is in progress continues.
    ///
    /// # Errors
    ///
    /// When [`EXPLANATIONS_MAX`] are in progress: more do not fit into a message.
    pub fn start(
        &mut self,
        id: &str,
        gateways: BTreeSet<GatewayBoot>,
        now: Instant,
    ) -> Result<(), TooManyLookups> {
        self.0.retain(|_, lookup| lookup.until > now);
        match self.0.get(id) {
            Some(lookup) if lookup.result == LookupResult::Pending => return Ok(()),
            None if self.0.len() >= EXPLANATIONS_MAX => return Err(TooManyLookups),
            Some(_) | None => {}
        }
        let result = if gateways.is_empty() { LookupResult::Unknown } else { LookupResult::Pending };
        self.0.insert(id.to_owned(), Lookup { waiting: gateways, result, until: now + LOOKUP_TTL });
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
    pub fn record(&mut self, gateway: &GatewayBoot, id: &str, explanation: Option<Value>) -> bool {
        let Some(lookup) = self.0.get_mut(id) else { return false };
        let was_waiting = lookup.waiting.remove(gateway);
        if lookup.result != LookupResult::Pending || !was_waiting {
            return false;
        }
        match explanation {
            Some(explanation) => {
                lookup.result = LookupResult::Found(gateway.region.to_string(), explanation);
            }
            None if lookup.waiting.is_empty() => lookup.result = LookupResult::Unknown,
            None => return false,
        }
        true
    }

    /// Returns the result of a lookup; an unknown or expired one is [`LookupResult::Unknown`].
    pub fn result(&self, id: &str, now: Instant) -> LookupResult {
        let lookup = self.0.get(id).filter(|lookup| lookup.until > now);
        lookup.map_or(LookupResult::Unknown, |lookup| lookup.result.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn gateway(boot_id: u64) -> GatewayBoot {
        GatewayBoot { region: "aws/us-east-1".parse().unwrap(), boot_id }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the tests need any instant, and compute the others from it"
    )]
    fn begin() -> Instant {
        Instant::now()
    }

    #[test]
    fn the_gateway_that_has_the_request_ends_the_lookup() {
        let (mut lookups, now) = (Lookups::default(), begin());
        lookups.start("r", BTreeSet::from([gateway(1), gateway(2)]), now).unwrap();
        assert_eq!(lookups.pending_for(&gateway(1), now), ["r"]);
        assert!(!lookups.record(&gateway(1), "r", None));
        assert_eq!(lookups.pending_for(&gateway(1), now), [""; 0], "it has responded");
        assert!(!lookups.record(&gateway(3), "r", Some(json!("forged"))), "it is not one of them");
        assert_eq!(lookups.result("r", now), LookupResult::Pending);
        assert!(lookups.record(&gateway(2), "r", Some(json!(1))));
        assert_eq!(lookups.result("r", now), LookupResult::Found("aws/us-east-1".to_owned(), json!(1)));
    }

    #[test]
    fn a_request_that_no_gateway_has_is_unknown() {
        let (mut lookups, now) = (Lookups::default(), begin());
        lookups.start("r", BTreeSet::from([gateway(1)]), now).unwrap();
        assert!(lookups.record(&gateway(1), "r", None));
        assert_eq!(lookups.result("r", now), LookupResult::Unknown);
        lookups.start("s", BTreeSet::new(), now).unwrap();
        assert_eq!(lookups.result("s", now), LookupResult::Unknown, "there is no gateway");
    }

    #[test]
    fn limit_of_lookups_is_enforced_and_expired_ones_free_slots() {
        let (mut lookups, now) = (Lookups::default(), begin());
        let gateways = BTreeSet::from([gateway(1)]);
        for number in 0..EXPLANATIONS_MAX {
            lookups.start(&number.to_string(), gateways.clone(), now).unwrap();
        }
        assert_eq!(lookups.start("more", gateways.clone(), now), Err(TooManyLookups));
        assert_eq!(lookups.start("0", gateways.clone(), now), Ok(()), "it is in progress already");
        assert_eq!(lookups.start("more", gateways, now + LOOKUP_TTL), Ok(()));
    }
}
