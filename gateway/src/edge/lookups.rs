//! Lookups of requests and searches that the console of a hub has requested from this gateway.
//!
//! Recent requests are found at once. Those on disk are read by tasks, so that the report that a hub waits for each second does
//! not wait for a disk; their results are in a later report, and the hub repeats what it still waits for. A result whose report
//! is lost is computed again.

use super::explain::{self, Explanations};
use super::explanation_archive::{ExplanationArchive, ReadCaller};
use regions::catalogue::Catalogue;
use scheduler_api::requests::{FoundRequestsV1, problem_text};
use scheduler_api::traffic::{
    EXPLANATION_BYTES_MAX, EXPLANATIONS_MAX, ExplainedRequest, SEARCHES_MAX, SearchV1,
};
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
    /// Routing decisions by the identifier of the request.
    pub(super) explained: BTreeMap<String, ExplainedRequest>,
    /// Results of searches.
    pub(super) searched: BTreeMap<u64, FoundRequestsV1>,
}

enum ReadResult {
    Explained(String, ExplainedRequest),
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
            self.results.explained.insert(id, Ok(Some(explain::to_json(&request, &self.catalogue))));
            return;
        }
        let Some(archive) = self.archive.clone() else {
            self.results.explained.insert(id, Ok(None));
            return;
        };
        if self.explaining.len() < EXPLANATIONS_MAX {
            self.explaining.insert(id.clone());
            self.reads.spawn(contained("explanation reads", async move {
                let found = archive.find(ReadCaller::Hub, id.clone()).await;
                ReadResult::Explained(id, found.map_err(problem_text))
            }));
        }
    }

    fn search(&mut self, search: SearchV1) {
        let number = search.search;
        if self.searching.contains(&number) {
            return;
        }
        let Some(archive) = self.archive.clone() else {
            self.results.searched.insert(number, FoundRequestsV1::default());
            return;
        };
        let filter = match search.into_filter() {
            Ok(filter) => filter,
            // A hub of a newer version may have conditions that this gateway does not know.
            Err(error) => {
                let problem =
                    format!("this gateway cannot search for this: {error}; upgrade the older version");
                self.results.searched.insert(number, FoundRequestsV1::failed(problem));
                return;
            }
        };
        if self.searching.len() < SEARCHES_MAX {
            self.searching.insert(number);
            self.reads.spawn(contained("explanation reads", async move {
                let found = archive.search(ReadCaller::Hub, filter).await;
                let found = found.map(|(found, restricted)| found.for_hub(&restricted));
                ReadResult::Searched(number, found.unwrap_or_else(FoundRequestsV1::failed))
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
            bytes +=
                explanation.iter().flatten().map(|explanation| explanation.to_string().len()).sum::<usize>();
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
    use crate::edge::ExplanationsConfig;
    use gateway_core::explanation_archive::ArchiveRules;
    use scheduler_api::requests::RequestFilterV1;
    use serde_json::json;
    use std::path::Path;
    use std::time::Duration;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn lookups(archive: Option<Arc<ExplanationArchive>>) -> HubLookups {
        HubLookups::new(Arc::new(Explanations::new()), archive, Arc::new(Catalogue::builtin()))
    }

    fn archive(dir: &Path) -> Arc<ExplanationArchive> {
        let rules =
            ArchiveRules { bytes_max: 32 << 20, hours: 1, slow: Duration::from_secs(1), sample_ratio: 0.0 };
        let config = ExplanationsConfig { dir: dir.to_owned(), rules };
        Arc::new(ExplanationArchive::start(&config, &Arc::new(Catalogue::builtin()), false).unwrap())
    }

    fn search(number: u64) -> SearchV1 {
        SearchV1::new(number, &RequestFilterV1::default())
    }

    #[tokio::test]
    async fn a_gateway_without_an_archive_responds_at_once() {
        let mut lookups = lookups(None);
        lookups.begin(vec!["one".to_owned()], vec![search(7)]);
        assert!(lookups.is_busy());
        let LookupResults { explained, searched } = lookups.take();
        assert_eq!(explained, BTreeMap::from([("one".to_owned(), Ok(None))]));
        assert_eq!(searched, BTreeMap::from([(7, FoundRequestsV1::default())]));
        assert!(!lookups.is_busy());
    }

    #[tokio::test]
    async fn a_disk_that_cannot_be_read_is_a_problem_and_not_an_empty_result() {
        let dir = tempfile::tempdir().unwrap();
        // A file where the directory should be.
        let path = dir.path().join("file");
        std::fs::write(&path, "").unwrap();
        let archive = archive(&path);
        let mut lookups = lookups(Some(archive.clone()));
        lookups.begin(vec!["one".to_owned()], vec![search(7)]);
        let mut results = LookupResults::default();
        let read = async {
            while results.explained.is_empty() || results.searched.is_empty() {
                let LookupResults { explained, searched } = lookups.take();
                results.explained.extend(explained);
                results.searched.extend(searched);
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(TIMEOUT, read).await.unwrap();
        let problem = results.explained["one"].clone().unwrap_err();
        assert!(problem.contains("cannot be read"), "{problem}");
        assert_eq!(results.searched[&7], FoundRequestsV1::failed(problem));
        archive.finish(TIMEOUT).await;
    }

    #[tokio::test]
    async fn a_condition_of_a_newer_hub_is_a_problem_and_does_not_widen_the_search() {
        let dir = tempfile::tempdir().unwrap();
        let archive = archive(dir.path());
        let mut lookups = lookups(Some(archive.clone()));
        lookups.begin(Vec::new(), vec![SearchV1 { search: 7, filter: json!({"size": "large"}) }]);
        let found = lookups.take().searched.remove(&7).unwrap();
        assert!(found.requests.is_empty() && found.has_more && found.is_enabled, "{found:?}");
        assert!(found.problem.is_some_and(|problem| problem.contains("size")));
        archive.finish(TIMEOUT).await;
    }

    #[tokio::test]
    async fn results_beyond_the_limit_of_a_report_follow_in_the_next() {
        let mut lookups = lookups(None);
        let ids = |from: usize| (from..from + EXPLANATIONS_MAX).map(|number| number.to_string()).collect();
        let searches = |from: u64| (from..from + SEARCHES_MAX as u64).map(search).collect();
        lookups.begin(ids(0), searches(0));
        lookups.begin(ids(EXPLANATIONS_MAX), searches(SEARCHES_MAX as u64));
        for _ in 0..2 {
            let taken = lookups.take();
            assert_eq!((taken.explained.len(), taken.searched.len()), (EXPLANATIONS_MAX, SEARCHES_MAX));
        }
        assert!(!lookups.is_busy());
    }
}
