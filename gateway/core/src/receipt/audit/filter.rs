//! Selection of the receipts that an audit judges.
//!
//! A filter never skips a line: every chain is verified completely, and both ends are joined over all receipts. It
//! selects what is counted and what is a finding, so that a pair of receipts on both sides of a time limit is still a
//! pair.

use serde::Serialize;

/// Selection of the judged receipts; the default selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Filter {
    /// Pseudonym of the tenant.
    pub tenant: Option<String>,
    /// Deployment.
    pub deployment: Option<String>,
    /// Start time, in milliseconds since 1970.
    pub from_ms: Option<u64>,
    /// End time, exclusive, in milliseconds since 1970.
    pub until_ms: Option<u64>,
}

impl Filter {
    /// Returns whether it selects everything.
    pub fn is_empty(&self) -> bool {
        *self == Filter::default()
    }

    /// Returns whether it selects a receipt of this tenant and deployment, at this time.
    pub(super) fn selects(&self, tenant: Option<&str>, deployment: Option<&str>, at_ms: u64) -> bool {
        let same =
            |wanted: &Option<String>, given| wanted.as_deref().is_none_or(|wanted| given == Some(wanted));
        same(&self.tenant, tenant) && same(&self.deployment, deployment) && self.overlaps(at_ms, at_ms)
    }

    /// Returns whether an event between `since_ms` and `at_ms` may concern the selected receipts.
    pub(super) fn overlaps(&self, since_ms: u64, at_ms: u64) -> bool {
        self.from_ms.is_none_or(|from| at_ms >= from) && self.until_ms.is_none_or(|until| since_ms < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_selects_by_each_of_its_parts_and_by_all_together() {
        let filter = Filter {
            tenant: Some("a1".to_owned()),
            deployment: Some("docs".to_owned()),
            from_ms: Some(10),
            until_ms: Some(20),
        };
        assert!(filter.selects(Some("a1"), Some("docs"), 10) && filter.selects(Some("a1"), Some("docs"), 19));
        assert!(
            !filter.selects(Some("a1"), Some("docs"), 9) && !filter.selects(Some("a1"), Some("docs"), 20)
        );
        assert!(!filter.selects(Some("a2"), Some("docs"), 10) && !filter.selects(None, Some("docs"), 10));
        assert!(!filter.selects(Some("a1"), Some("other"), 10) && !filter.selects(Some("a1"), None, 10));
        assert!(filter.overlaps(0, 10) && filter.overlaps(19, 30) && filter.overlaps(0, 99));
        assert!(!filter.overlaps(0, 9) && !filter.overlaps(20, 30));
        assert!(
            Filter::default().is_empty() && Filter::default().selects(None, None, 0) && !filter.is_empty()
        );
    }
}
