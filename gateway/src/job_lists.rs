//! Pages of lists of jobs, files and batches: as a region renders one, and as a gateway merges those of several regions.
//!
//! A page ends at the number of rows that the client requests, or earlier at [`LIST_BYTES_MAX`]; `has_more` says that there are
//! further rows in either case, so clients read page after page as usual.

use serde_json::Value;

/// Longest page of a region, bytes. A gateway holds one of each region in memory.
pub(crate) const LIST_BYTES_MAX: usize = 4 << 20;

/// Text before and after the rows of a page.
const BEGIN: &str = r#"{"object":"list","data":["#;
const END: [&str; 2] = [r#"],"has_more":false}"#, r#"],"has_more":true}"#];

/// Renders a page: the first `limit` rows, and fewer if they have more than [`LIST_BYTES_MAX`] bytes together.
pub(crate) fn page(rows: impl Iterator<Item = Value>, limit: usize) -> String {
    let (mut text, mut count, mut has_more) = (BEGIN.to_owned(), 0, false);
    for row in rows {
        let row = row.to_string();
        let bytes = text.len() + usize::from(count > 0) + row.len() + END[0].len();
        // A row is less than a tenth of the limit: its texts are limited where they are accepted.
        if count == limit || (count > 0 && bytes > LIST_BYTES_MAX) {
            has_more = true;
            break;
        }
        if count > 0 {
            text.push(',');
        }
        text.push_str(&row);
        count += 1;
    }
    text.push_str(END[usize::from(has_more)]);
    text
}

/// Page of one region.
#[derive(Debug, Default)]
pub(crate) struct RegionPage {
    /// Rows, the newest first.
    rows: Vec<Value>,
    /// Whether the region has older rows.
    has_more: bool,
}

impl RegionPage {
    /// Reads the page of a region; none if it is not a list.
    pub(crate) fn read(text: &[u8]) -> Option<RegionPage> {
        let mut page: Value = serde_json::from_slice(text).ok()?;
        let rows = std::mem::take(page["data"].as_array_mut()?);
        Some(RegionPage { rows, has_more: page["has_more"] == true })
    }
}

/// Merges the pages of several regions: the newest rows, at most `limit`, and whether there are more. Rows that are older than
/// the last one of a region with further rows are left out, since those come before them; they are on the next page.
pub(crate) fn merge(pages: Vec<RegionPage>, limit: usize) -> (Vec<Value>, bool) {
    fn id(row: &Value) -> &str {
        row["id"].as_str().unwrap_or_default()
    }
    let mut has_more = pages.iter().any(|page| page.has_more);
    let with_more = pages.iter().filter(|page| page.has_more);
    let complete_from = with_more.filter_map(|page| page.rows.last()).map(id).max().map(str::to_owned);
    let mut rows: Vec<Value> = pages.into_iter().flat_map(|page| page.rows).collect();
    rows.retain(|row| complete_from.as_deref().is_none_or(|oldest| id(row) >= oldest));
    // Identifiers sort by the time of the submission.
    rows.sort_by(|a, b| id(b).cmp(id(a)));
    has_more |= rows.len() > limit;
    rows.truncate(limit);
    (rows, has_more)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(number: usize, bytes: usize) -> Value {
        json!({"id": format!("file-{number:04}"), "filename": "x".repeat(bytes)})
    }

    fn read(text: &str) -> (Vec<Value>, bool) {
        let RegionPage { rows, has_more } = RegionPage::read(text.as_bytes()).expect("a list");
        (rows, has_more)
    }

    #[test]
    fn a_page_ends_at_its_number_of_rows_and_at_its_bytes() {
        let numbers = |limit| read(&page((0..3).map(|number| row(number, 10)), limit));
        assert_eq!(numbers(3), ((0..3).map(|number| row(number, 10)).collect(), false));
        assert_eq!(numbers(2), ((0..2).map(|number| row(number, 10)).collect(), true));
        assert_eq!(read(&page(std::iter::empty(), 2)), (Vec::new(), false));

        // Two rows that fill the page to the byte, and one byte more.
        let overhead = page([row(0, 0), row(1, 0)].into_iter(), 10).len();
        for (more, rows) in [(0, 2), (1, 1)] {
            let sizes = [1 << 20, LIST_BYTES_MAX - overhead - (1 << 20) + more];
            let text = page(sizes.into_iter().enumerate().map(|(number, bytes)| row(number, bytes)), 10);
            assert!(text.len() <= LIST_BYTES_MAX, "{}", text.len());
            assert_eq!(text.len() == LIST_BYTES_MAX, more == 0);
            let (read, has_more) = read(&text);
            assert_eq!((read.len(), has_more), (rows, rows < 2));
        }
    }

    #[test]
    fn every_row_is_on_one_page_however_the_regions_cut_theirs() {
        // Three regions with every third row each, of which one cuts its pages after two rows and another after five.
        let cuts = [2, 5, 100];
        for limit in [1, 3, 7, 100] {
            let (mut seen, mut after) = (Vec::new(), "file-9999".to_owned());
            loop {
                let of_region = |(region, cut): (usize, usize)| {
                    let rows =
                        (0..50).rev().filter(|number| number % 3 == region).map(|number| row(number, 1));
                    let rows = rows.filter(|row| row["id"].as_str() < Some(after.as_str()));
                    RegionPage::read(page(rows, limit.min(cut)).as_bytes()).expect("a list")
                };
                let (rows, has_more) = merge(cuts.into_iter().enumerate().map(of_region).collect(), limit);
                assert!(rows.len() <= limit && !(rows.is_empty() && has_more));
                seen.extend(rows.iter().map(|row| row["id"].as_str().expect("an id").to_owned()));
                let Some(last) = seen.last().filter(|_| has_more) else { break };
                after.clone_from(last);
            }
            let expected: Vec<_> = (0..50).rev().map(|number| format!("file-{number:04}")).collect();
            assert_eq!(seen, expected, "{limit}");
        }
    }
}
