//! Open pages, by visitor.

use std::collections::BTreeMap;

/// Maximum number of open pages: each gets some 200 KiB a second.
pub const PAGES_MAX: usize = 64;
/// Maximum number of open pages of one visitor, so that one visitor does not use up all.
pub const VISITOR_PAGES_MAX: usize = 16;

/// Number of open pages by the name of the visitor.
#[derive(Debug, Default)]
pub struct OpenPages(BTreeMap<String, usize>);

/// Limit that a further page would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TooManyPages {
    /// [`PAGES_MAX`].
    All,
    /// [`VISITOR_PAGES_MAX`].
    OfVisitor,
}

impl OpenPages {
    /// Adds a page.
    ///
    /// # Errors
    ///
    /// The limit that it would exceed.
    pub fn open(&mut self, visitor: &str) -> Result<(), TooManyPages> {
        let own = self.0.get(visitor).copied().unwrap_or(0);
        if own >= VISITOR_PAGES_MAX {
            return Err(TooManyPages::OfVisitor);
        }
        if self.count() >= PAGES_MAX {
            return Err(TooManyPages::All);
        }
        self.0.insert(visitor.to_owned(), own + 1);
        Ok(())
    }

    /// Removes a page.
    pub fn close(&mut self, visitor: &str) {
        if let Some(own) = self.0.get_mut(visitor) {
            *own = own.saturating_sub(1);
        }
        self.0.retain(|_, own| *own > 0);
    }

    /// Returns the number of pages.
    pub fn count(&self) -> usize {
        self.0.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_pages_are_enforced_and_a_closed_page_frees_one() {
        let mut pages = OpenPages::default();
        let visitors: Vec<_> = (0..PAGES_MAX / VISITOR_PAGES_MAX).map(|number| number.to_string()).collect();
        for visitor in &visitors {
            for _ in 0..VISITOR_PAGES_MAX {
                assert_eq!(pages.open(visitor), Ok(()));
            }
            assert_eq!(pages.open(visitor), Err(TooManyPages::OfVisitor));
        }
        assert_eq!((pages.count(), pages.open("other")), (PAGES_MAX, Err(TooManyPages::All)));
        pages.close(&visitors[0]);
        assert_eq!((pages.open("other"), pages.open("other")), (Ok(()), Err(TooManyPages::All)));
        pages.close("other");
        assert_eq!(pages.open(&visitors[0]), Ok(()));
        assert_eq!(pages.open(&visitors[0]), Err(TooManyPages::OfVisitor));
    }
}
