// The guided tour: ten short steps that drive the page.
