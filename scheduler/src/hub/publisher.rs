//! The published route table and plan, and the reported state of the store; shared by the follower and leader roles.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use regions::{Generation, RouteTable};
use scheduler_api::plan::GatewayInstance;
use scheduler_api::route::{RouteTableV1, changes};
use scheduler_core::hub::planning::PlanPart;
use scheduler_core::table_history::TableHistory;
use scheduler_store::StoreError;
use tokio::sync::watch;

use super::plans::PublishedPlan;
use super::scrape::HubMetrics;
use super::{Current, PublishedTable, records};
use crate::events::{StoreFailed, StoreRecovered, TablePublished};

pub(super) struct Publisher {
    publish: watch::Sender<Current>,
    plans: Arc<PublishedPlan>,
    failing: AtomicBool,
    pub(super) metrics: Arc<HubMetrics>,
}

impl Publisher {
    pub(super) fn new(
        publish: watch::Sender<Current>,
        plans: Arc<PublishedPlan>,
        metrics: Arc<HubMetrics>,
    ) -> Publisher {
        Publisher { publish, plans, failing: AtomicBool::new(false), metrics }
    }

    /// Publishes those parts of a plan that are newer than the published ones.
    pub(super) fn publish_plan(&self, parts: impl IntoIterator<Item = PlanPart>) {
        parts.into_iter().for_each(|part| self.plans.publish(part));
    }

    /// Removes the shares of gateways that are gone.
    pub(super) fn remove_shares<'a>(&self, gateways: impl IntoIterator<Item = &'a GatewayInstance>) {
        gateways.into_iter().for_each(|gateway| self.plans.remove_shares(gateway));
    }

    /// Returns the generation of the published table.
    pub(super) fn generation(&self) -> Option<Generation> {
        self.publish.borrow().as_ref().map(|published| published.table.generation)
    }

    /// Publishes this table if it is newer than the published one, so that no generation falls, whatever the store
    /// holds.
    pub(super) fn publish(&self, table: RouteTable) {
        if self.generation().is_some_and(|published_now| table.generation <= published_now) {
            return;
        }
        let (regions, deployments) = (table.regions.len(), table.deployments.len());
        TablePublished { generation: table.generation, regions, deployments }.emit();
        self.metrics.tables_published.add(1);
        let wire = RouteTableV1::from(&table);
        let body = records::bytes(&wire).into();
        let previous = self.publish.borrow().clone();
        let mut history = TableHistory::default();
        if let Some(previous) = previous {
            let changes = changes::changes(&previous.table, &table, changes::checksum(&wire));
            history.clone_from(&previous.history);
            history.push(previous.table.generation, changes.as_ref().map(records::bytes));
        }
        self.publish.send_replace(Some(Arc::new(PublishedTable { table, body, history })));
    }

    /// Counts failures of the store, and logs when it becomes unavailable and when it is available again.
    pub(super) fn report_store(&self, problem: Option<&StoreError>) {
        self.metrics.store_errors.add(u64::from(problem.is_some()));
        match problem {
            None if self.failing.swap(false, Ordering::Relaxed) => StoreRecovered.emit(),
            Some(error) if !self.failing.swap(true, Ordering::Relaxed) => StoreFailed { error }.emit(),
            None | Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_tables_are_not_published() {
        let (publish, current) = watch::channel(None);
        let publisher = Publisher::new(publish, Arc::default(), Arc::default());
        let table = |text: &str| RouteTable { generation: text.parse().unwrap(), ..RouteTable::empty() };
        for (text, published_now) in [("4.2", "4.2"), ("4.1", "4.2"), ("3.9", "4.2"), ("5.1", "5.1")] {
            publisher.publish(table(text));
            let now = current.borrow().as_ref().map(|published| published.table.generation.to_string());
            assert_eq!(now.as_deref(), Some(published_now));
        }
    }
}
