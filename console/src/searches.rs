//! Searches for requests: the hub requests each from all gateways, and joins what they have found.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use scheduler_api::plan::GatewayBoot;
use scheduler_api::requests::{
    DISK_READ_MAX, FOUND_DEFAULT, FoundRequestV1, FoundRequestsV1, RequestFilterV1,
};
use scheduler_api::traffic::{SEARCHES_MAX, SearchV1, TRAFFIC_PERIOD};
use serde::Serialize;

/// Time limit of a search: two reports of a gateway, and the read of its disk.
pub const SEARCH_TTL: Duration = DISK_READ_MAX.saturating_add(TRAFFIC_PERIOD.saturating_mul(2));
/// Time after [`SEARCH_TTL`] at which a search is removed whose result was not taken, as when its page was closed.
const TAKEN_WITHIN: Duration = Duration::from_secs(2);
/// Maximum number of searches of one visitor at a time: half of all, so that one visitor does not use up all.
pub const VISITOR_SEARCHES_MAX: usize = SEARCHES_MAX / 2;

/// Searches in progress.
#[derive(Debug)]
pub struct Searches {
    /// Number of the next one. The first is random, because a gateway may send the result of a search of the process before.
    next: u64,
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

/// Reason why the result of a gateway is incomplete or absent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct SearchProblem {
    /// Region of the gateway.
    pub gateway: String,
    /// Reason.
    pub problem: String,
}

/// Result of a search so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SearchResult {
    /// Requests, the newest first.
    pub requests: Vec<FoundRow>,
    /// Whether older requests may match too.
    pub has_more: bool,
    /// Regions of the gateways that have not responded.
    pub unresponsive: BTreeSet<String>,
    /// Regions of gateways that keep no explanations on disk.
    pub disabled: BTreeSet<String>,
    /// Reasons why results are incomplete.
    pub problems: BTreeSet<SearchProblem>,
}

/// The maximum number of searches is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManySearches;

impl Searches {
    /// Creates the searches of a hub. `first` is a random number.
    pub fn new(first: u64) -> Searches {
        Searches { next: first, searches: BTreeMap::new() }
    }

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
        self.remove_expired(now);
        let own = self.searches.values().filter(|search| search.visitor == visitor).count();
        if self.searches.len() >= SEARCHES_MAX || own >= VISITOR_SEARCHES_MAX {
            return Err(TooManySearches);
        }
        let number = self.next;
        self.next = number.wrapping_add(1);
        let (visitor, until) = (visitor.to_owned(), now + SEARCH_TTL);
        let search =
            PendingSearch { visitor, filter, waiting: gateways, result: SearchResult::default(), until };
        self.searches.insert(number, search);
        Ok(number)
    }

    /// Removes the searches whose time is over and whose result was not taken.
    fn remove_expired(&mut self, now: Instant) {
        self.searches.retain(|_, search| search.until + TAKEN_WITHIN > now);
    }

    /// Returns the searches that a gateway has not responded to yet.
    pub fn pending_for(&mut self, gateway: &GatewayBoot, now: Instant) -> Vec<SearchV1> {
        self.remove_expired(now);
        let is_pending = |search: &PendingSearch| search.until > now && search.waiting.contains(gateway);
        let pending = self.searches.iter().filter(|(_, search)| is_pending(search));
        pending.map(|(number, search)| SearchV1::new(*number, &search.filter)).collect()
    }

    /// Records what a gateway has found. Returns whether all gateways have responded.
    pub fn record(&mut self, gateway: &GatewayBoot, number: u64, found: FoundRequestsV1) -> bool {
        let Some(search) = self.searches.get_mut(&number) else { return false };
        if !search.waiting.remove(gateway) {
            return false;
        }
        let FoundRequestsV1 { requests, has_more, is_enabled, problem } = found;
        let region = gateway.region.to_string();
        let PendingSearch { result, filter, .. } = search;
        let rows = requests.into_iter().map(|request| FoundRow { gateway: region.clone(), request });
        result.requests.extend(rows);
        result.requests.sort_by_key(|row| Reverse(row.request.at_ms));
        let limit = filter.limit.unwrap_or(FOUND_DEFAULT).min(FOUND_DEFAULT);
        result.has_more |= has_more || result.requests.len() > limit;
        result.requests.truncate(limit);
        if let Some(problem) = problem {
            result.problems.insert(SearchProblem { gateway: region.clone(), problem });
        }
        if !is_enabled {
            result.disabled.insert(region);
        }
        search.waiting.is_empty()
    }

    /// Returns whether all gateways have responded.
    pub fn is_complete(&self, number: u64) -> bool {
        self.searches.get(&number).is_none_or(|search| search.waiting.is_empty())
    }

    /// Ends a search, and returns its result; `None` if it has been removed.
    pub fn end(&mut self, number: u64) -> Option<SearchResult> {
        let PendingSearch { waiting, mut result, .. } = self.searches.remove(&number)?;
        result.unresponsive = waiting.into_iter().map(|gateway| gateway.region.to_string()).collect();
        Some(result)
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
            kept: KeptReason::Failed.to_string(),
            tenant: None,
            deployment: None,
            region: None,
            status: Some(503),
            outcome: "overloaded".to_owned(),
            total_ms: 1.0,
            attempts: Vec::new(),
        };
        let requests = times.into_iter().map(request).collect();
        FoundRequestsV1 { requests, has_more: false, is_enabled: true, problem: None }
    }

    fn start(searches: &mut Searches, visitor: &str, now: Instant) -> Result<u64, TooManySearches> {
        let filter = RequestFilterV1 { limit: Some(3), ..RequestFilterV1::default() };
        searches.start((filter, visitor), BTreeSet::from([gateway(1), gateway(2)]), now)
    }

    #[test]
    fn the_newest_requests_of_all_gateways_are_joined() {
        let (mut searches, now) = (Searches::new(7), some_instant());
        let number = start(&mut searches, "ada", now).unwrap();
        assert_eq!(searches.pending_for(&gateway(1), now).len(), 1);
        assert!(!searches.record(&gateway(1), number, found([9, 2, 1])));
        assert!(searches.pending_for(&gateway(1), now).is_empty(), "it has responded");
        assert!(!searches.record(&gateway(1), number, found([5])), "it has responded");
        assert!(!searches.record(&gateway(3), number, found([7])), "it is not one of them");
        assert!(!searches.is_complete(number));
        assert!(searches.record(&gateway(2), number, found([8, 3])));
        let result = searches.end(number).unwrap();
        let times: Vec<_> = result.requests.iter().map(|row| row.request.at_ms).collect();
        assert_eq!((times, result.has_more, result.unresponsive.len()), (vec![9, 8, 3], true, 0));
    }

    #[test]
    fn gateways_without_a_response_or_without_files_are_named() {
        let (mut searches, now) = (Searches::new(7), some_instant());
        let number = start(&mut searches, "ada", now).unwrap();
        searches.record(&gateway(1), number, FoundRequestsV1::default());
        assert!(searches.end(number + 1).is_none());
        let result = searches.end(number).unwrap();
        let region = BTreeSet::from(["aws/us-east-1".to_owned()]);
        assert_eq!((result.unresponsive, result.disabled), (region.clone(), region));
        assert!(searches.pending_for(&gateway(2), now).is_empty(), "it has ended");
    }

    #[test]
    fn limits_of_searches_are_enforced_and_ended_ones_free_slots() {
        let (mut searches, now) = (Searches::new(7), some_instant());
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
        assert!(start(&mut searches, "alan", now + SEARCH_TTL + TAKEN_WITHIN).is_ok());
    }

    #[test]
    fn a_problem_of_a_gateway_is_shown_with_its_region() {
        let (mut searches, now) = (Searches::new(7), some_instant());
        let number = start(&mut searches, "ada", now).unwrap();
        searches.record(&gateway(1), number, FoundRequestsV1::failed("the disk failed"));
        assert!(searches.record(&gateway(2), number, found([1])));
        let result = searches.end(number).unwrap();
        let gateway = "aws/us-east-1".to_owned();
        let problem = SearchProblem { gateway, problem: "the disk failed".to_owned() };
        assert_eq!(result.problems, BTreeSet::from([problem]));
        assert_eq!((result.requests.len(), result.has_more), (1, true));
        assert!(result.disabled.is_empty() && result.unresponsive.is_empty());
    }

    #[test]
    fn numbers_begin_with_the_given_one_so_that_an_older_result_has_no_effect() {
        let now = some_instant();
        let old = start(&mut Searches::new(7), "ada", now).unwrap();
        let mut searches = Searches::new(u64::MAX);
        let number = start(&mut searches, "ada", now).unwrap();
        assert_eq!((old, number, start(&mut searches, "ada", now)), (7, u64::MAX, Ok(0)));
        assert!(!searches.record(&gateway(1), old, found([1])));
        assert!(searches.end(number).unwrap().requests.is_empty());
    }

    #[test]
    fn a_search_is_requested_within_its_time_and_removed_afterwards() {
        let (mut searches, now) = (Searches::new(7), some_instant());
        let number = start(&mut searches, "ada", now).unwrap();
        let last = now + SEARCH_TTL - Duration::from_millis(1);
        assert_eq!(searches.pending_for(&gateway(1), last).len(), 1);
        assert!(searches.pending_for(&gateway(1), now + SEARCH_TTL).is_empty());
        assert_eq!(searches.searches.len(), 1, "its result has not been taken");
        assert!(searches.pending_for(&gateway(1), now + SEARCH_TTL + TAKEN_WITHIN).is_empty());
        assert!(searches.searches.is_empty());
        assert!(!searches.record(&gateway(1), number, found([1])));
    }
}
