//! Formats of `/metrics`, and which one a scrape gets.

/// Text format of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text format of Prometheus, version 0.0.4: the default.
    Prometheus,
    /// OpenMetrics, version 1.0.0, which has exemplars.
    OpenMetrics,
}

impl Format {
    /// Returns the format for a request with this `accept` header: OpenMetrics if the client names it and does not
    /// prefer text. A wildcard stands for text, which every client reads.
    pub fn negotiate(accept: Option<&str>) -> Format {
        let ranges = || accept.unwrap_or_default().split(',').filter_map(MediaRange::parse);
        let best = |matches: fn(&MediaRange<'_>) -> bool| {
            ranges().filter(matches).map(|range| range.quality).max_by(f64::total_cmp)
        };
        let open = best(|range| range.name == "application/openmetrics-text" && range.has_version("1.0.0"));
        let plain = best(|range| range.name == "text/plain" && range.has_version("0.0.4"));
        let text = plain.or_else(|| best(|range| ["text/*", "*/*"].contains(&range.name)));
        match open {
            Some(open) if open > 0.0 && open >= text.unwrap_or(0.0) => Format::OpenMetrics,
            Some(_) | None => Format::Prometheus,
        }
    }

    /// Returns the value of the header `content-type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Media range of an `accept` header.
struct MediaRange<'a> {
    name: &'a str,
    version: Option<&'a str>,
    quality: f64,
}

impl<'a> MediaRange<'a> {
    /// Parses a range; `None` without a name or with an invalid quality.
    fn parse(text: &'a str) -> Option<MediaRange<'a>> {
        let mut parts = text.split(';').map(str::trim);
        let name = parts.next().filter(|name| !name.is_empty())?;
        let mut range = MediaRange { name, version: None, quality: 1.0 };
        for (key, value) in parts.filter_map(|part| part.split_once('=')) {
            match key.trim() {
                "version" => range.version = Some(value.trim().trim_matches('"')),
                "q" => range.quality = value.trim().parse().ok().filter(|q| (0.0..=1.0).contains(q))?,
                _ => {}
            }
        }
        Some(range)
    }

    /// Returns whether the client accepts this version.
    fn has_version(&self, version: &str) -> bool {
        self.version.is_none_or(|wanted| wanted == version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_sent_to_clients_that_name_it_and_do_not_prefer_text() {
        let open = [
            // Prometheus 2.53 and 3.
            "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
             text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
             text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.3",
            "application/openmetrics-text; version=1.0.0",
            "application/openmetrics-text",
            "application/openmetrics-text, text/plain",
        ];
        open.iter()
            .for_each(|accept| assert_eq!(Format::negotiate(Some(accept)), Format::OpenMetrics, "{accept}"));
        let plain = [
            "",
            "*/*",
            "text/plain",
            "application/openmetrics-text;version=0.0.1",
            "application/openmetrics-text;version=1.0.0;q=0",
            "application/openmetrics-text;version=1.0.0;q=2",
            "application/openmetrics-text;version=1.0.0;q=0.3,text/plain;q=0.4",
            "application/openmetrics-text;q=0.3,*/*",
            ";;=,,q",
        ];
        plain
            .iter()
            .for_each(|accept| assert_eq!(Format::negotiate(Some(accept)), Format::Prometheus, "{accept}"));
        assert_eq!(Format::negotiate(None), Format::Prometheus);
    }
}
