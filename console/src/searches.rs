//! Searches for requests: the hub requests each from all gateways, and joins what they have found.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use scheduler_api::plan::GatewayBoot;
use scheduler_api::requests::{FOUND_DEFAULT, FoundRequestV1, FoundRequestsV1, RequestFilterV1};
use scheduler_api::traffic::{SEARCHES_MAX, SearchV1};
use serde::Serialize;

/// Time limit of a search: some reports of a gateway, and the reads of its disk.
pub const SEARCH_TTL: Duration = Duration::from_secs(8);
/// Maximum number of searches of one visitor at a time: half of all, so that one visitor does not use up all.
pub const VISITOR_SEARCHES_MAX: usize = SEARCHES_MAX / 2;

/// Searches in progress.
#[derive(Debug, Default)]
pub struct Searches {
    /// Number of the last one.
    last: u64,
    searches: BTreeMap<u64, PendingSearch>,
}

#[derive(Debug)]
struct PendingSearch {
    /// Name of the visitor who started it.
    visitor: String,
    filter: RequestFilterV1,
    waiting: BTreeSet<GatewayBoot>,
    result: SearchResult,
    until: Instant,
}

/// Request, and the region of the gateway that served it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FoundRow {
    /// Region of the gateway.
    pub gateway: String,
    /// Request.
    #[serde(flatten)]
    pub request: FoundRequestV1,
}

/// Result of a search so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SearchResult {
    /// Requests, the newest first.
    pub requests: Vec<FoundRow>,
    /// Whether older requests may match too.
    pub has_more: bool,
    /// Regions of the gateways that have not responded.
    pub silent: BTreeSet<String>,
    /// Regions of gateways that keep no explanations on disk.
    pub disabled: BTreeSet<String>,
}

/// The maximum number of searches is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManySearches;

impl Searches {
    /// Starts a search at these gateways, for a visitor. Returns its number.
    ///
    /// # Errors
    ///
    /// When [`SEARCHES_MAX`] are in progress, as more do not fit into a message, or [`VISITOR_SEARCHES_MAX`] of this visitor.
    pub fn start(
        &mut self,
        (filter, visitor): (RequestFilterV1, &str),
        gateways: BTreeSet<GatewayBoot>,
        now: Instant,
    ) -> Result<u64, TooManySearches> {
        self.searches.retain(|_, search| search.until > now);
        let own = self.searches.values().filter(|search| search.visitor == visitor).count();
        if self.searches.len() >= SEARCHES_MAX || own >= VISITOR_SEARCHES_MAX {
            return Err(TooManySearches);
        }
        self.last += 1;
        let (visitor, until) = (visitor.to_owned(), now + SEARCH_TTL);
        let search =
            PendingSearch { visitor, filter, waiting: gateways, result: SearchResult::default(), until };
        self.searches.insert(self.last, search);
        Ok(self.last)
    }

    /// Returns the searches that a gateway has not responded to yet.
    pub fn pending_for(&self, gateway: &GatewayBoot, now: Instant) -> Vec<SearchV1> {
        let is_pending = |search: &PendingSearch| search.until > now && search.waiting.contains(gateway);
        let pending = self.searches.iter().filter(|(_, search)| is_pending(search));
        pending.map(|(number, search)| SearchV1 { search: *number, filter: search.filter.clone() }).collect()
    }

    /// Records what a gateway has found. Returns whether all gateways have responded.
    pub fn record(&mut self, gateway: &GatewayBoot, number: u64, found: FoundRequestsV1) -> bool {
        let Some(search) = self.searches.get_mut(&number) else { return false };
        if !search.waiting.remove(gateway) {
            return false;
        }
        let FoundRequestsV1 { requests, has_more, is_enabled } = found;
        let region = gateway.region.to_string();
        let PendingSearch { result, filter, .. } = search;
        let rows = requests.into_iter().map(|request| FoundRow { gateway: region.clone(), request });
        result.requests.extend(rows);
        result.requests.sort_by_key(|row| Reverse(row.request.at_ms));
        let limit = filter.limit.unwrap_or(FOUND_DEFAULT).min(FOUND_DEFAULT);
        result.has_more |= has_more || result.requests.len() > limit;
        result.requests.truncate(limit);
        if !is_enabled {
            result.disabled.insert(region);
        }
        search.waiting.is_empty()
    }

    /// Returns whether all gateways have responded.
    pub fn is_complete(&self, number: u64) -> bool {
        self.searches.get(&number).is_none_or(|search| search.waiting.is_empty())
    }

    /// Ends a search, and returns its result.
    pub fn end(&mut self, number: u64) -> SearchResult {
        let Some(PendingSearch { waiting, mut result, .. }) = self.searches.remove(&number) else {
            return SearchResult::default();
        };
        result.silent = waiting.into_iter().map(|gateway| gateway.region.to_string()).collect();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use scheduler_api::requests::KeptReason;

    fn gateway(boot_id: u64) -> GatewayBoot {
        GatewayBoot { region: "aws/us-east-1".parse().unwrap(), boot_id }
    }

    fn found(times: impl IntoIterator<Item = u64>) -> FoundRequestsV1 {
        let request = |at_ms: u64| FoundRequestV1 {
            id: Some(at_ms.to_string()),
            at_ms,
            kept: KeptReason::Failed,
            tenant: None,
            deployment: None,
            region: None,
            status: Some(503),
            outcome: "overloaded".to_owned(),
            total_ms: 1.0,
            attempts: Vec::new(),
        };
        let requests = times.into_iter().map(request).collect();
        FoundRequestsV1 { requests, has_more: false, is_enabled: true }
    }

    fn start(searches: &mut Searches, visitor: &str, now: Instant) -> Result<u64, TooManySearches> {
        let filter = RequestFilterV1 { limit: Some(3), ..RequestFilterV1::default() };
        searches.start((filter, visitor), BTreeSet::from([gateway(1), gateway(2)]), now)
    }

    #[test]
    fn the_newest_requests_of_all_gateways_are_joined() {
        let (mut searches, now) = (Searches::default(), some_instant());
        let number = start(&mut searches, "ada", now).unwrap();
        assert_eq!(searches.pending_for(&gateway(1), now).len(), 1);
        assert!(!searches.record(&gateway(1), number, found([9, 2, 1])));
        assert!(searches.pending_for(&gateway(1), now).is_empty(), "it has responded");
        assert!(!searches.record(&gateway(1), number, found([5])), "it has responded");
        assert!(!searches.record(&gateway(3), number, found([7])), "it is not one of them");
        assert!(!searches.is_complete(number));
        assert!(searches.record(&gateway(2), number, found([8, 3])));
        let result = searches.end(number);
        let times: Vec<_> = result.requests.iter().map(|row| row.request.at_ms).collect();
        assert_eq!((times, result.has_more, result.silent.len()), (vec![9, 8, 3], true, 0));
    }

    #[test]
    fn gateways_without_a_response_or_without_files_are_named() {
        let (mut searches, now) = (Searches::default(), some_instant());
        let number = start(&mut searches, "ada", now).unwrap();
        searches.record(&gateway(1), number, FoundRequestsV1::default());
        let result = searches.end(number);
        let region = BTreeSet::from(["aws/us-east-1".to_owned()]);
        assert_eq!((result.silent, result.disabled), (region.clone(), region));
        assert!(searches.pending_for(&gateway(2), now).is_empty(), "it has ended");
    }

    #[test]
    fn limits_of_searches_are_enforced_and_ended_ones_free_slots() {
        let (mut searches, now) = (Searches::default(), some_instant());
        let first = start(&mut searches, "ada", now).unwrap();
        for _ in 1..VISITOR_SEARCHES_MAX {
            start(&mut searches, "ada", now).unwrap();
        }
        assert_eq!(start(&mut searches, "ada", now), Err(TooManySearches));
        for number in VISITOR_SEARCHES_MAX..SEARCHES_MAX {
            start(&mut searches, &number.to_string(), now).unwrap();
        }
        assert_eq!(start(&mut searches, "grace", now), Err(TooManySearches));
        searches.end(first);
        assert!(start(&mut searches, "grace", now).is_ok());
        assert!(start(&mut searches, "alan", now + SEARCH_TTL).is_ok());
    }
}
