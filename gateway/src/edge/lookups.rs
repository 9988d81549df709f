//! Lookups of requests and searches that the console of a hub has requested from this gateway.
//!
//! Recent requests are found at once. Those on disk are read by tasks, so that the report that a hub waits for each second does
//! not wait for a disk; their results are in a later report, and the hub repeats what it still waits for. A result whose report
//! is lost is computed again.

use super::explain::{self, Explanations};
use super::explanation_archive::ExplanationArchive;
use regions::catalogue::Catalogue;
use scheduler_api::requests::{FoundRequestsV1, RequestFilter};
use scheduler_api::traffic::{EXPLANATION_BYTES_MAX, EXPLANATIONS_MAX, SEARCHES_MAX, SearchV1};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use supervision::task::contained;
use tokio::task::JoinSet;

/// Lookups and searches of one hub.
pub(super) struct HubLookups {
    explanations: Arc<Explanations>,
    archive: Option<Arc<ExplanationArchive>>,
    catalogue: Arc<Catalogue>,
    reads: JoinSet<Option<ReadResult>>,
    /// Requests that are being read.
    explaining: BTreeSet<String>,
    /// Searches in progress.
    searching: BTreeSet<u64>,
    /// Results that no report has had.
    results: LookupResults,
}

/// Results for a report.
#[derive(Debug, Default, PartialEq)]
pub(super) struct LookupResults {
    /// Routing decisions by the identifier of the request; `None` for unknown requests.
    pub(super) explained: BTreeMap<String, Option<Value>>,
    /// Results of searches.
    pub(super) searched: BTreeMap<u64, FoundRequestsV1>,
}

enum ReadResult {
    Explained(String, Option<Value>),
    Searched(u64, FoundRequestsV1),
}

impl HubLookups {
    pub(super) fn new(
        explanations: Arc<Explanations>,
        archive: Option<Arc<ExplanationArchive>>,
        catalogue: Arc<Catalogue>,
    ) -> HubLookups {
        HubLookups {
            explanations,
            archive,
            catalogue,
            reads: JoinSet::new(),
            explaining: BTreeSet::new(),
            searching: BTreeSet::new(),
            results: LookupResults::default(),
        }
    }

    /// Begins what the hub requests, unless it is in progress.
    pub(super) fn begin(&mut self, explain: Vec<String>, search: Vec<SearchV1>) {
        explain.into_iter().take(EXPLANATIONS_MAX).for_each(|id| self.explain(id));
        search.into_iter().take(SEARCHES_MAX).for_each(|search| self.search(search));
    }

    fn explain(&mut self, id: String) {
        if self.explaining.contains(&id) {
            return;
        }
        if let Some(request) = self.explanations.find(&id) {
            self.results.explained.insert(id, Some(explain::to_json(&request, &self.catalogue)));
            return;
        }
        let Some(archive) = self.archive.clone() else {
            self.results.explained.insert(id, None);
            return;
        };
        if self.explaining.len() < EXPLANATIONS_MAX {
            self.explaining.insert(id.clone());
            self.reads.spawn(contained("explanation reads", async move {
                let found = archive.find(id.clone()).await;
                // The file is not readable now; the person can try again.
                ReadResult::Explained(id, found.ok().flatten())
            }));
        }
    }

    fn search(&mut self, SearchV1 { search, filter }: SearchV1) {
        if self.searching.contains(&search) {
            return;
        }
        let filter = RequestFilter::try_from(filter);
        let (Some(archive), Ok(filter)) = (self.archive.clone(), filter) else {
            self.results.searched.insert(search, FoundRequestsV1::default());
            return;
        };
        if self.searching.len() < SEARCHES_MAX {
            self.searching.insert(search);
            self.reads.spawn(contained("explanation reads", async move {
                let incomplete =
                    FoundRequestsV1 { has_more: true, is_enabled: true, ..FoundRequestsV1::default() };
                let found = archive.search(filter).await;
                let found = found.map_or(incomplete, |(found, restricted)| found.for_hub(&restricted));
                ReadResult::Searched(search, found)
            }));
        }
    }

    /// Returns whether results are being read or wait for a report.
    pub(super) fn is_busy(&self) -> bool {
        !self.reads.is_empty() || self.results != LookupResults::default()
    }

    /// Returns the results so far, as many as fit into a report. The others follow in the next one.
    pub(super) fn take(&mut self) -> LookupResults {
        while let Some(ended) = self.reads.try_join_next() {
            match ended {
                Ok(Some(ReadResult::Explained(id, found))) => {
                    self.explaining.remove(&id);
                    self.results.explained.insert(id, found);
                }
                Ok(Some(ReadResult::Searched(search, found))) => {
                    self.searching.remove(&search);
                    self.results.searched.insert(search, found);
                }
                // A panic, which was logged and counted. What the hub still waits for is begun again.
                Ok(None) | Err(_) => {
                    self.explaining.clear();
                    self.searching.clear();
                }
            }
        }
        let (mut taken, mut bytes) = (LookupResults::default(), 0);
        while let Some((id, explanation)) = self.results.explained.pop_first() {
            bytes += explanation.as_ref().map_or(0, |explanation| explanation.to_string().len());
            let is_too_large = bytes > EXPLANATION_BYTES_MAX && !taken.explained.is_empty();
            if is_too_large || taken.explained.len() == EXPLANATIONS_MAX {
                self.results.explained.insert(id, explanation);
                break;
            }
            taken.explained.insert(id, explanation);
        }
        while taken.searched.len() < SEARCHES_MAX {
            let Some((search, found)) = self.results.searched.pop_first() else { break };
            taken.searched.insert(search, found);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_api::requests::RequestFilterV1;

    fn lookups() -> HubLookups {
        HubLookups::new(Arc::new(Explanations::new()), None, Arc::new(Catalogue::builtin()))
    }

    #[tokio::test]
    async fn a_gateway_without_an_archive_responds_at_once() {
        let mut lookups = lookups();
        let search = SearchV1 { search: 7, filter: RequestFilterV1::default() };
        lookups.begin(vec!["one".to_owned()], vec![search]);
        assert!(lookups.is_busy());
        let LookupResults { explained, searched } = lookups.take();
        assert_eq!(explained, BTreeMap::from([("one".to_owned(), None)]));
        assert_eq!(searched, BTreeMap::from([(7, FoundRequestsV1::default())]));
        assert!(!lookups.is_busy());
    }

    #[tokio::test]
    async fn results_beyond_the_limit_of_a_report_follow_in_the_next() {
        let mut lookups = lookups();
        let ids = |from: usize| (from..from + EXPLANATIONS_MAX).map(|number| number.to_string()).collect();
        let searches = |from: u64| {
            let search = |search| SearchV1 { search, filter: RequestFilterV1::default() };
            (from..from + SEARCHES_MAX as u64).map(search).collect()
        };
        lookups.begin(ids(0), searches(0));
        lookups.begin(ids(EXPLANATIONS_MAX), searches(SEARCHES_MAX as u64));
        for _ in 0..2 {
            let taken = lookups.take();
            assert_eq!((taken.explained.len(), taken.searched.len()), (EXPLANATIONS_MAX, SEARCHES_MAX));
        }
        assert!(!lookups.is_busy());
    }
}
