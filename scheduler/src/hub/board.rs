//! What is given out, and what is said of the store: whoever follows and whoever leads write on the same board.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use regions::{Generation, RouteTable};
use scheduler_core::hub::planning::PlanPart;
use scheduler_core::wire::route::RouteTableV1;
use scheduler_store::StoreError;
use tokio::sync::watch;

use super::plans::Plans;
use super::{Current, Published, records};
use crate::events::{StoreFailing, StoreRecovered, TablePublished};

pub(super) struct Board {
    publish: watch::Sender<Current>,
    plans: Arc<Plans>,
    failing: AtomicBool,
}

impl Board {
    pub(super) fn new(publish: watch::Sender<Current>, plans: Arc<Plans>) -> Board {
        Board { publish, plans, failing: AtomicBool::new(false) }
    }

    /// Gives these parts of a plan out, as far as they supersede those that are.
    pub(super) fn publish_plan(&self, parts: impl IntoIterator<Item = PlanPart>) {
        parts.into_iter().for_each(|part| self.plans.publish(part));
    }

    /// Of the table that is given out.
    pub(super) fn generation(&self) -> Option<Generation> {
        self.publish.borrow().as_ref().map(|published| published.table.generation)
    }

    /// Gives this table out, if it supersedes the one that is: nobody is told an older one, whatever a store says.
    pub(super) fn publish(&self, table: RouteTable) {
        if self.generation().is_some_and(|given_out| table.generation <= given_out) {
            return;
        }
        let (regions, deployments) = (table.regions.len(), table.deployments.len());
        TablePublished { generation: table.generation, regions, deployments }.emit();
        let body = records::bytes(&RouteTableV1::from(&table)).into();
        self.publish.send_replace(Some(Arc::new(Published { table, body })));
    }

    /// Tells when the store begins to fail and when it works again.
    pub(super) fn note(&self, problem: Option<&StoreError>) {
        match problem {
            None if self.failing.swap(false, Ordering::Relaxed) => StoreRecovered.emit(),
            Some(error) if !self.failing.swap(true, Ordering::Relaxed) => StoreFailing { error }.emit(),
            None | Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_does_not_supersede_is_not_given_out() {
        let (publish, current) = watch::channel(None);
        let board = Board::new(publish, Arc::default());
        let table = |text: &str| RouteTable { generation: text.parse().unwrap(), ..RouteTable::empty() };
        for (text, given_out) in [("4.2", "4.2"), ("4.1", "4.2"), ("3.9", "4.2"), ("5.1", "5.1")] {
            board.publish(table(text));
            let now = current.borrow().as_ref().map(|published| published.table.generation.to_string());
            assert_eq!(now.as_deref(), Some(given_out));
        }
    }
}
